/**
 * What is known of the pool, and what can be asked of it.
 *
 * Rule 1: one model for all views; each says what it watches, and nothing is read that nobody watches.
 * Rule 2: changes come by the server's event bus and are then read; a slow poll covers a lost event.
 * Rule 3: readings of devices are polled, as news since the last answer, while a view that shows them is visible.
 * Rule 4: hidden pages and lost connections ask nothing; what was missed is read when they are back.
 * Rule 5: nothing is shown from here: no dialog, no notification.
 */

import { URLExt } from '@jupyterlab/coreutils';
import type { Event, ServerConnection } from '@jupyterlab/services';
import { VDomModel } from '@jupyterlab/ui-components';
import { DisposableDelegate, type IDisposable } from '@lumino/disposable';
import { Poll } from '@lumino/polling';
import { ISignal, Signal } from '@lumino/signaling';

import { API_PATH, call, ICallOptions, Problem } from './request';
import type { IPoolModel, IStand, Topic } from './tokens';
import type {
  Change,
  Defaults,
  Device,
  Evidence,
  Explanation,
  HealthAction,
  Hour,
  Lease,
  Log,
  Notice,
  Pool,
  Request
} from './types';
import type { Project, UsageRow, Waiting } from './types';
import type * as Wire from './wire';

/** Every Jupyter event of the pool has a schema whose id holds this. */
export const EVENT_MARK = 'gpupool';
/** Milliseconds between two looks at what changes by events. */
const STATE_MS = 10_000;
/** The longest time in milliseconds between two tries of a server that does not answer. */
const MOST_MS = 60_000;

/** The server extension says besides whether these are all devices, or only news. */
type IDevices = Wire.Devices & { full?: boolean };
/** How a topic is read, and what becomes of the answer. Devices have a way of their own. */
type Reader = (model: PoolModel) => Promise<void>;

/** The model of the pool. */
export class PoolModel extends VDomModel implements IPoolModel {
  constructor(options: PoolModel.IOptions) {
    super();
    this._settings = options.serverSettings;
    this._connected = options.connected ?? (() => true);
    this._events = options.events;
    this._events?.connect(this._onEvent, this);
    this._state = new Poll({
      name: 'jupyter-gpupool:state',
      auto: false,
      factory: () => this._readState(),
      frequency: { interval: STATE_MS, backoff: true, max: MOST_MS },
      standby: () => (this._idle('state') ? true : 'when-hidden')
    });
    this._readings = new Poll({
      name: 'jupyter-gpupool:readings',
      auto: false,
      factory: () => this._readDevices(),
      frequency: { interval: options.interval ?? 2000, backoff: true, max: MOST_MS },
      standby: () => (this._idle('devices') ? true : 'when-hidden')
    });
    document.addEventListener('visibilitychange', this._onVisible);
    void this._state.start();
    void this._readings.start();
  }

  get pool(): Pool | null {
    return this._pool;
  }
  get stand(): IStand | null {
    return this._stand;
  }
  get devices(): readonly Device[] {
    return this._devices;
  }
  get leases(): readonly Lease[] {
    return this._leases;
  }
  get everyone(): readonly Lease[] {
    return this._everyone;
  }
  get queue(): readonly Waiting[] {
    return this._queue;
  }
  get projects(): readonly Project[] {
    return this._projects;
  }

  get defaults(): Defaults | null {
    return this._defaults;
  }
  get usage(): readonly UsageRow[] {
    return this._usage;
  }
  get history(): readonly Hour[] {
    return this._history;
  }
  get problem(): Problem | null {
    return this._problem;
  }
  get noticed(): ISignal<IPoolModel, Notice> {
    return this._noticed;
  }

  /** Milliseconds between two looks at the readings. */
  get interval(): number {
    return this._readings.frequency.interval;
  }
  set interval(ms: number) {
    this._readings.frequency = { interval: ms, backoff: true, max: Math.max(MOST_MS, ms) };
  }

  known(topic: Topic): boolean {
    return this._known.has(topic);
  }

  now(): number {
    return Date.now() / 1000;
  }

  /** Keep topics up to date until the answer is disposed of. */
  watch(...topics: Topic[]): IDisposable {
    topics.forEach(topic => this._watchers.set(topic, (this._watchers.get(topic) ?? 0) + 1));
    void this.refresh();
    return new DisposableDelegate(() =>
      topics.forEach(topic => this._watchers.set(topic, (this._watchers.get(topic) ?? 1) - 1))
    );
  }

  /** Read again whatever is watched, soon; what is being read now counts as old. */
  async refresh(): Promise<void> {
    this._stale = { state: true, devices: true };
    await Promise.all([this._state.refresh(), this._readings.refresh()]);
  }

  trial(what: Request): Promise<Explanation> {
    return this._call('POST', ['requests'], { body: what, query: { dry_run: 'true' } });
  }

  request(what: Request, key: string): Promise<Lease> {
    return this._act('POST', ['requests'], { body: what, headers: { 'Idempotency-Key': key } });
  }

  release(lease: string): Promise<void> {
    return this._act('DELETE', ['leases', lease]);
  }

  change(lease: string, what: Change, restart = false): Promise<Lease> {
    const query = restart ? { restart: 'true' } : undefined;
    return this._act('PATCH', ['leases', lease], { body: what, query });
  }

  explain(lease: string): Promise<Explanation> {
    return this._call('GET', ['leases', lease, 'explain']);
  }

  async logs(lease: string): Promise<Log[]> {
    return (await this._call<Wire.Logs>('GET', ['leases', lease, 'logs'])).logs;
  }

  async reach(start: boolean): Promise<void> {
    await this._act('POST', ['pool'], { body: { action: start ? 'start' : 'retry' } });
  }

  evidence(device: string): Promise<Evidence> {
    return this._call('GET', ['health', device]);
  }

  health(target: string, action: HealthAction, why: string): Promise<void> {
    return this._act('POST', ['health', target], { body: { action, why } });
  }

  dashboard(lease: string): string {
    return URLExt.join(
      this._settings.baseUrl,
      API_PATH,
      'leases',
      encodeURIComponent(lease),
      'dashboard/status'
    );
  }

  override dispose(): void {
    if (this.isDisposed) {
      return;
    }
    this._events?.disconnect(this._onEvent, this);
    document.removeEventListener('visibilitychange', this._onVisible);
    this._state.dispose();
    this._readings.dispose();
    super.dispose();
    Signal.clearData(this);
  }

  private _call<T>(method: string, path: string[], options?: ICallOptions): Promise<T> {
    return call<T>(this._settings, method, path, options);
  }

  /** Change something, then read what has become of it. */
  private async _act<T>(method: string, path: string[], options?: ICallOptions): Promise<T> {
    const answer = await this._call<T>(method, path, options);
    await this.refresh();
    return answer;
  }

  private _watched(topic: Topic): boolean {
    return (this._watchers.get(topic) ?? 0) > 0;
  }

  /** Whether there is nothing to ask now. */
  private _idle(what: 'state' | 'devices'): boolean {
    const topics = what === 'devices' ? (['devices'] as Topic[]) : (Object.keys(READERS) as Topic[]);
    return !this._connected() || !topics.some(topic => this._watched(topic));
  }

  /** Read all that is watched but devices; throws, so that the poll backs off, when the pool is out of reach. */
  private async _readState(): Promise<void> {
    do {
      this._stale.state = false;
      const topics = (Object.keys(READERS) as Topic[]).filter(topic => this._watched(topic));
      const catching = this._catching ? [this._catchUp()] : [];
      const answers = await Promise.allSettled([...topics.map(topic => READERS[topic]!(this)), ...catching]);
      if (this.isDisposed) {
        return;
      }
      topics.forEach((topic, n) => answers[n]!.status === 'fulfilled' && this._known.add(topic));
      const failed = answers.find((each): each is PromiseRejectedResult => each.status === 'rejected');
      this._settle(failed?.reason);
      this.stateChanged.emit();
    } while (this._stale.state && !this._problem);
    if (this._problem) {
      throw this._problem;
    }
  }

  private _settle(error: unknown): void {
    const problem = error === undefined ? null : Problem.of(error);
    // What was read before is old after a gap: events have been missed.
    this._catching = this._catching || problem !== null;
    this._problem = problem;
  }

  private async _readDevices(): Promise<void> {
    try {
      do {
        this._stale.devices = false;
        const query = { since: String(this._sequence) };
        this.mergeDevices(await this._call<IDevices>('GET', ['devices'], { query }));
        this._problem = null;
      } while (this._stale.devices && !this.isDisposed);
    } catch (error) {
      this._settle(error);
      throw error;
    } finally {
      if (!this.isDisposed) {
        this.stateChanged.emit();
      }
    }
  }

  /** Take in what has changed of the devices. */
  mergeDevices(answer: IDevices): void {
    const all = answer.full ?? (this._sequence === 0 || answer.sequence < this._sequence);
    const rows = new Map(all ? [] : this._devices.map(each => [each.uuid, each]));
    answer.devices.forEach(each => rows.set(each.uuid, each));
    answer.gone.forEach(uuid => rows.delete(uuid));
    // A device that has changed stays where it is; only new ones have to be put in their place.
    const sorted = !all && answer.devices.every(each => this._places.has(each.uuid));
    if (all || answer.devices.length || answer.gone.length) {
      this._devices = sorted ? [...rows.values()] : [...rows.values()].sort(byPlace);
      this._places = new Set(rows.keys());
    }
    this._sequence = answer.sequence;
    this._known.add('devices');
  }

  /** Read notices after the last one that is known; at first only where they stand. */
  private async _catchUp(): Promise<void> {
    for (let more = true; more;) {
      const query = { after: String(this._next), limit: '500' };
      const answer = await this._call<Wire.Notices>('GET', ['notices'], { query });
      if (this._caught) {
        answer.notices.forEach(notice => this._notice(notice));
      }
      this._next = Math.max(this._next, answer.next);
      more = answer.notices.length === 500;
    }
    this._caught = true;
    this._catching = false;
  }

  private _onEvent(_: unknown, event: Event.Emission): void {
    if (!event.schema_id.includes(EVENT_MARK)) {
      return;
    }
    this._catching = true;
    void this.refresh();
  }

  /** A page that is looked at again shows what is true now. */
  private _onVisible = (): void => {
    if (!document.hidden) {
      this._catching = true;
      void this.refresh();
    }
  };

  private _notice(notice: Notice): void {
    if (notice.seq > this._told) {
      this._told = notice.seq;
      this._noticed.emit(notice);
    }
  }

  /** How each topic but devices is read. */
  static readonly readers: Partial<Record<Topic, Reader>> = {
    pool: async model => {
      const stand = await model._call<IStand>('GET', ['pool']);
      model._stand = stand;
      model._pool = stand.pool;
      if (!stand.pool) {
        throw new Problem(503, [{ ...stand, field: '' }]);
      }
    },
    leases: async model => {
      model._leases = (await model._call<Wire.Leases>('GET', ['leases'])).leases;
    },
    everyone: async model => {
      model._everyone = (
        await model._call<Wire.Leases>('GET', ['leases'], { query: { all: 'true' } })
      ).leases;
    },
    queue: async model => {
      model._queue = (await model._call<Wire.Queue>('GET', ['queue'])).queue;
    },
    projects: async model => {
      const now = await model._call<Wire.ProjectsNow>('GET', ['projects']);
      model._projects = now.projects;
      model._defaults = now.defaults;
    },
    usage: async model => {
      model._usage = (await model._call<Wire.Usage>('GET', ['usage'])).usage;
    },
    history: async model => {
      model._history = (await model._call<Wire.History>('GET', ['history'])).hours;
    }
  };

  private _pool: Pool | null = null;
  private _stand: IStand | null = null;
  private _devices: Device[] = [];
  /** Which devices are in the list. */
  private _places = new Set<string>();
  private _leases: Lease[] = [];
  private _everyone: Lease[] = [];
  private _queue: Waiting[] = [];
  private _projects: Project[] = [];
  private _defaults: Defaults | null = null;
  private _usage: UsageRow[] = [];
  private _history: Hour[] = [];
  private _problem: Problem | null = null;
  private _known = new Set<Topic>();
  /** What has been asked for anew since its reading began. */
  private _stale = { state: false, devices: false };
  private _watchers = new Map<Topic, number>();
  /** Of the devices: the number that the next look asks with. */
  private _sequence = 0;
  /** Of the notices: the number that the next look asks with; the last that was told. */
  private _next = 0;
  private _told = 0;
  /** Whether notices are to be read at the next look, and whether it is known where they stood at first. */
  private _catching = true;
  private _caught = false;
  private _noticed = new Signal<IPoolModel, Notice>(this);
  private _settings: ServerConnection.ISettings;
  private _connected: () => boolean;
  private _events: Event.Stream | undefined;
  private _state: Poll;
  private _readings: Poll;
}

const READERS = PoolModel.readers;

/** Devices are in the order of their nodes, as people count them, then of their indexes. */
function byPlace(one: Device, other: Device): number {
  return one.node === other.node ? one.index - other.index : BY_NUMBER.compare(one.node, other.node);
}

const BY_NUMBER = new Intl.Collator(undefined, { numeric: true });

export namespace PoolModel {
  /** What a model is made of. */
  export interface IOptions {
    /** The connection to the Jupyter server. */
    serverSettings: ServerConnection.ISettings;
    /** The server's events. */
    events?: Event.Stream;
    /** Whether the server can be reached now. */
    connected?: () => boolean;
    /** Milliseconds between two looks at the readings. */
    interval?: number;
  }
}
