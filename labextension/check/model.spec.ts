/**
 * What the model promises, against a server of a few lines that says what it is asked.
 */

import { ServerConnection } from '@jupyterlab/services';
import { nullTranslator } from '@jupyterlab/translation';
import { Signal } from '@lumino/signaling';

import schema from '../schema/plugin.json';
import { asRequest, EMPTY, misread, placed } from '../src/draft';
import { clock, duration, gigabytes, gpus, seconds } from '../src/format';
import { days } from '../src/history';
import { PoolModel } from '../src/model';
import { SHOWN } from '../src/notices';
import { Problem } from '../src/request';
import { forbidden, onRights } from '../src/rights';
import type { IPoolModel } from '../src/tokens';
import type { Device, Hour, Notice } from '../src/types';

/** A request as far as JupyterLab looks at it; jsdom has none. */
class Asked {
  headers = { has: () => true, append: () => undefined };
  method: string;
  constructor(
    readonly url: string,
    init: RequestInit
  ) {
    this.method = init.method ?? 'GET';
  }
}

/** A server: answers by method and path, and a list of what it was asked. */
class Server {
  asked: string[] = [];
  answers: Record<string, () => unknown> = {};
  down = false;

  settings = ServerConnection.makeSettings({
    baseUrl: 'http://lab/',
    appendToken: false,
    Request: Asked,
    fetch: async (asked: Asked) => this._fetch(asked)
  } as never);

  private async _fetch(asked: Asked): Promise<Response> {
    const url = new URL(asked.url);
    const path = `${asked.method} ${url.pathname.replace('/gpupool/', '')}`;
    this.asked.push(path + (url.searchParams.get('since') ? `?since=${url.searchParams.get('since')}` : ''));
    if (this.down) {
      throw new TypeError('the server is away');
    }
    const said = this.answers[path]?.() ?? {};
    const status = (said as { status?: number }).status ?? 200;
    const text = JSON.stringify(said);
    return { ok: status < 400, status, statusText: '', text: async () => text } as Response;
  }
}

const trans = nullTranslator.load('');
const POOL = { gpus: 2, gpus_free: 1, user: { name: 'ann', admin: false, scopes: [] } };
const STAND = {
  state: 'connected',
  reason: '',
  sentence: '',
  advice: '',
  can_start: false,
  may: {},
  pool: POOL
};

function device(uuid: string, index: number, more: Partial<Device> = {}): Device {
  return { uuid, index, node: 'node-1', parts: [], ...more } as Device;
}

function notice(seq: number): Notice {
  return { seq, time: 0, user: 'ann', notice: 'granted', lease: 'l', sentence: `notice ${seq}`, data: {} };
}

async function soon(so: () => boolean): Promise<void> {
  for (let tries = 0; tries < 200 && !so(); tries++) {
    await new Promise(done => setTimeout(done, 10));
  }
  expect(so()).toBe(true);
}

describe('PoolModel', () => {
  let server: Server;
  let events: Signal<unknown, { schema_id: string }>;
  let model: PoolModel;
  let connected: boolean;

  beforeEach(() => {
    server = new Server();
    server.answers = {
      'GET pool': () => STAND,
      'GET leases': () => ({ leases: [] }),
      'GET queue': () => ({ queue: [] }),
      'GET notices': () => ({ notices: [], next: 0, missed: false }),
      'GET devices': () => ({ devices: [device('a', 0), device('b', 1)], gone: [], sequence: 5, full: true })
    };
    events = new Signal<unknown, { schema_id: string }>({});
    connected = true;
    model = new PoolModel({
      serverSettings: server.settings,
      events: events as never,
      connected: () => connected,
      interval: 20
    });
  });

  afterEach(() => model.dispose());

  it('reads nothing that nobody watches', async () => {
    await new Promise(done => setTimeout(done, 100));
    expect(server.asked).toEqual([]);
  });

  it('reads what is watched, and stops when it is not', async () => {
    const watch = model.watch('devices');
    await soon(() => model.devices.length === 2);
    expect(server.asked.every(each => each.startsWith('GET devices'))).toBe(true);
    watch.dispose();
    await new Promise(done => setTimeout(done, 60));
    const before = server.asked.length;
    await new Promise(done => setTimeout(done, 120));
    expect(server.asked.length).toBe(before);
  });

  it('reads what a verdict rests on when it is asked, and fails with the sentence of the pool', async () => {
    server.answers['GET health/GPU-1'] = () => ({ name: 'node-1/gpu0', evidence: { rule: 'xid gone' } });
    expect((await model.evidence('GPU-1')).evidence.rule).toBe('xid gone');
    server.answers['GET health/GPU-1'] = () => ({ status: 404, detail: 'There is none.' });
    await expect(model.evidence('GPU-1')).rejects.toThrow('There is none.');
    expect(server.asked).toEqual(['GET health/GPU-1', 'GET health/GPU-1']);
  });

  it('asks for news of devices only, and keeps the objects of those that are as they were', async () => {
    model.watch('devices');
    await soon(() => model.devices.length === 2);
    const first = model.devices[0];
    server.answers['GET devices'] = () => ({
      devices: [device('b', 1, { model: 'new' })],
      gone: [],
      sequence: 6,
      full: false
    });
    await soon(() => model.devices[1]?.model === 'new');
    expect(model.devices[0]).toBe(first);
    expect(server.asked).toContain('GET devices?since=5');
  });

  it('forgets devices that are gone, and all when the server begins anew', () => {
    model.mergeDevices({ devices: [device('a', 0), device('b', 1)], gone: [], sequence: 5, simulated: true });
    model.mergeDevices({ devices: [], gone: ['a'], sequence: 6, simulated: true });
    expect(model.devices.map(each => each.uuid)).toEqual(['b']);
    model.mergeDevices({ devices: [device('c', 0)], gone: [], sequence: 2, full: true, simulated: true });
    expect(model.devices.map(each => each.uuid)).toEqual(['c']);
  });

  it('puts devices in the order of nodes as people count them', () => {
    const nodes = ['node-10', 'node-2', 'node-1'].map((node, n) => device(node, n, { node }));
    model.mergeDevices({ devices: nodes, gone: [], sequence: 1, full: true, simulated: true });
    expect(model.devices.map(each => each.node)).toEqual(['node-1', 'node-2', 'node-10']);
  });

  it('reads again after an event of the pool, and not after one of others', async () => {
    model.watch('leases');
    await soon(() => model.known('leases'));
    const count = (): number => server.asked.filter(each => each === 'GET leases').length;
    const before = count();
    events.emit({ schema_id: 'https://jupyter.org/contents_service/v1' });
    await new Promise(done => setTimeout(done, 50));
    expect(count()).toBe(before);
    events.emit({ schema_id: 'https://jupyter-gpupool.readthedocs.io/events/lease/v1' });
    await soon(() => count() > before);
  });

  it('tells each notice once, and none from before it was there', async () => {
    const told: number[] = [];
    model.noticed.connect((_, each) => told.push(each.seq));
    let all = [notice(1), notice(2)];
    server.answers['GET notices'] = () => ({ notices: all, next: all[all.length - 1]!.seq, missed: false });
    model.watch('pool');
    await soon(() => model.known('pool'));
    expect(told).toEqual([]);
    all = [notice(3)];
    events.emit({ schema_id: 'jupyter-gpupool/notice' });
    await soon(() => told.length > 0);
    events.emit({ schema_id: 'jupyter-gpupool/notice' });
    await new Promise(done => setTimeout(done, 50));
    expect(told).toEqual([3]);
  });

  it('asks nothing while the connection is lost', async () => {
    connected = false;
    model.watch('pool', 'devices');
    await new Promise(done => setTimeout(done, 100));
    expect(server.asked).toEqual([]);
    connected = true;
    void model.refresh();
    await soon(() => model.pool !== null);
  });

  it('reads what the ledger has of me only while that is watched', async () => {
    server.answers['GET history'] = () => ({ user: 'ann', now: 9, hours: [{ time: 1, used: 2, idle: 0 }] });
    model.watch('pool');
    await soon(() => model.known('pool'));
    expect(server.asked).not.toContain('GET history');
    const watch = model.watch('history');
    await soon(() => model.history.length === 1);
    watch.dispose();
  });

  it('says why the pool is out of reach, and forgets it when it is back', async () => {
    server.answers['GET pool'] = () => ({ ...STAND, state: 'lost', sentence: 'No pool runs.', pool: null });
    model.watch('pool');
    await soon(() => model.problem !== null);
    expect(model.problem?.message).toBe('No pool runs.');
    server.answers['GET pool'] = () => STAND;
    void model.refresh();
    await soon(() => model.problem === null && model.pool !== null);
  });

  it('reads what came while it was reading', async () => {
    let first = true;
    server.answers['GET queue'] = () => {
      if (first) {
        first = false;
        void model.refresh();
      }
      return { queue: [] };
    };
    model.watch('queue');
    await soon(() => server.asked.filter(each => each === 'GET queue').length >= 2);
  });

  it('passes all faults of a refusal on, with their fields', async () => {
    const errors = [
      { reason: 'too_many_gpus', sentence: 'There are 2.', advice: 'Ask for 2.', field: 'gpus' },
      { reason: 'time_limit', sentence: 'Too long.', advice: '', field: 'time_limit' }
    ];
    server.answers['POST requests'] = () => ({ status: 400, detail: 'There are 2.', errors });
    const problem = await model.request({ gpus: 99 }, 'key').then(
      () => null,
      (error: Problem) => error
    );
    expect(problem?.status).toBe(400);
    expect(problem?.faults.map(each => each.field)).toEqual(['gpus', 'time_limit']);
  });

  it('makes a sentence of a server that does not answer', async () => {
    server.down = true;
    await expect(model.explain('x')).rejects.toMatchObject({ status: 0 });
  });

  it('names paths that need quoting, and the dashboard under the base URL', async () => {
    await model.release('a/b');
    expect(server.asked).toContain('DELETE leases/a%2Fb');
    expect(model.dashboard('l1')).toBe('http://lab/gpupool/leases/l1/dashboard/status');
  });
});

describe('forbidden', () => {
  const as = (may: object, scopes: string[]): IPoolModel =>
    ({ stand: { may }, pool: { user: { scopes } } }) as unknown as IPoolModel;

  it.each([
    ['what the server allows and the token covers', { write: true, execute: true }, ['read', 'use'], '', ''],
    ['what only the server refuses', { write: false, execute: false }, ['read', 'use'], 'server', 'server'],
    ['what only the token does not cover', { write: true, execute: true }, ['read'], 'token', '']
  ])('says why not: %s', (_, may, scopes, write, execute) => {
    const model = as(may, scopes);
    const said = (['write', 'execute'] as const).map(need => forbidden(model, need, trans));
    expect(said.map(each => /server|token/.exec(each)?.[0] ?? each)).toEqual([write, execute]);
  });

  it('says nothing before anything is known', () => {
    const model = { stand: null, pool: null } as unknown as IPoolModel;
    expect(forbidden(model, 'write', trans)).toBe('');
  });

  it('tells when a right is another, and only then', () => {
    let changes = 0;
    const model = { ...as({ write: true }, ['use']), stateChanged: new Signal({}) } as unknown as IPoolModel;
    onRights(model, trans, () => (changes += 1));
    const tell = (): void => (model.stateChanged as Signal<object, void>).emit();
    tell();
    Object.assign(model, { stand: { may: { write: false } } });
    tell();
    tell();
    expect(changes).toBe(1);
  });
});

describe('SHOWN', () => {
  it('has no notice that cannot be silenced, and the settings none that is not shown', () => {
    const names = schema.properties.silencedNotices.items.enum;
    expect([...names].sort()).toEqual(Object.keys(SHOWN).sort());
  });
});

describe('asRequest', () => {
  it.each([
    [{}, { gpus: '1' }],
    [
      { gpus: '2', max_gpus: '8', time_limit: ' 2h ' },
      { gpus: '2', max_gpus: '8', time_limit: '2h' }
    ],
    [{ kind: 'share', vram: '20GB', max_gpus: '8' }, { vram: '20GB' }],
    [
      { kind: 'share', vram: '20GB', gpus: '2', same_device: true, exclude: 'node-2, node-3/gpu0' },
      { vram: '20GB', gpus: '2', same_device: true, exclude: ['node-2', 'node-3/gpu0'] }
    ],
    [
      { kind: 'mig', mig: '1g.10gb', nvlink: true, isolated: true },
      { mig: '1g.10gb', nvlink: true }
    ],
    [
      { kind: 'share', vram: '9GB', isolated: true, min_gpus: '1' },
      { vram: '9GB', isolated: true }
    ],
    [
      { gpus: '4', min_gpus: '2', cpus: '8', memory: '64GB ', priority: '3' },
      { gpus: '4', min_gpus: '2', cpus: '8', memory: '64GB', priority: '3' }
    ],
    [
      { python: ' /opt/bin/python', pre_import: 'cudf, torch', variables: 'A=1\n\n B = x=y \nC=' },
      {
        gpus: '1',
        environment: {
          python: '/opt/bin/python',
          pre_import: ['cudf', 'torch'],
          variables: { A: '1', B: 'x=y', C: '' }
        }
      }
    ],
    [
      { working_directory: '/data', options: 'rmm_pool_size=0.8' },
      { gpus: '1', environment: { working_directory: '/data' }, options: { rmm_pool_size: '0.8' } }
    ]
  ] as const)('says only what was said, and that a person is at it: %j', (draft, what) => {
    expect(asRequest({ ...EMPTY, ...draft })).toEqual({ ...what, interactive: true });
  });
});

describe('misread', () => {
  it('names each line that is not NAME=VALUE, and its field', () => {
    const found = misread({ ...EMPTY, variables: 'A=1\nB', options: '=2' }, trans);
    expect(found.map(each => [each.field, each.sentence])).toEqual([
      ['variables', '“B” is not NAME=VALUE.'],
      ['options', '“=2” is not NAME=VALUE.']
    ]);
    expect(misread({ ...EMPTY, variables: 'A=1' }, trans)).toEqual([]);
  });
});

describe('placed', () => {
  const fault = (field: string): { field: string } & Record<'reason' | 'sentence' | 'advice', string> => ({
    reason: 'bad_request',
    sentence: 'No.',
    advice: '',
    field
  });
  it.each([
    ['gpus', {}, ['gpus']],
    ['min_gpus', {}, ['min_gpus']],
    ['environment.python', {}, ['python']],
    ['options.rmm_async', {}, ['options']],
    ['gpus', { kind: 'mig' }, ['gpus']],
    ['min_gpus', { kind: 'mig' }, []],
    ['project', {}, []],
    ['', {}, []]
  ] as const)('puts a fault of "%s" beside its field where that is shown (%j)', (field, draft, shown) => {
    const [beside, others] = placed({ ...EMPTY, ...draft }, [fault(field)], ['project']);
    expect(beside.map(each => each.field)).toEqual(shown);
    expect(beside.length + others.length).toBe(1);
  });
});

describe('format', () => {
  it.each([
    [0, '0 s'],
    [59, '59 s'],
    [60, '1 min'],
    [3600, '1 h'],
    [7500, '2 h 5 min'],
    [90_000, '1 d 1 h'],
    [86_400 + 60, '1 d']
  ])('writes %d seconds as %s', (given, text) => expect(duration(given)).toBe(text));

  it('writes memory and GPUs shortly', () => {
    expect(gigabytes(80 * 1024 ** 3)).toBe('80');
    expect(gigabytes(1.5 * 1024 ** 3)).toBe('1.5');
    expect(gpus(0.4684)).toBe('0.47');
    expect(gpus(2)).toBe('2');
  });

  it('reads times as people write them', () => {
    expect(seconds('2h')).toBe(7200);
    expect(seconds('30 min')).toBe(1800);
    expect(seconds('soon')).toBeNull();
  });

  it('names the day of a time that is not today', () => {
    const now = new Date(2026, 0, 2, 12).getTime() / 1000;
    expect(clock(now + 60, now)).not.toContain('Jan');
    expect(clock(now + 86_400, now)).toContain('Jan');
  });
});

describe('days', () => {
  const noon = new Date(2026, 0, 2, 12).getTime() / 1000;
  const at = (hours: number, used: number, idle = 0): Hour => ({ time: noon + 3600 * hours, used, idle });

  it('sums hours by day, and keeps idle ones apart', () => {
    const found = days([at(-13, 7200), at(-12, 3600, 1800), at(-1, 3600)], noon, 2);
    expect(found.map(each => each.hours)).toEqual([2, 2]);
    expect(found.map(each => each.idle)).toEqual([0, 0.5]);
  });

  it('has a row for days without use, and none for days before the first', () => {
    const found = days([at(-100, 3600), at(-1, 3600)], noon, 3);
    expect(found.map(each => each.hours)).toEqual([0, 0, 1]);
  });
});
