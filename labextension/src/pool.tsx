/**
 * The Pool panel: every device as a tile, by node.
 *
 * A tile is drawn anew only when its device's object is another one, which the model promises for changes only.
 */

import type { TranslationBundle } from '@jupyterlab/translation';
import React from 'react';

import { gigabytes, gpus } from './format';
import { IViewProps, Loaded, Meter, Nothing, verdicts } from './parts';
import type { Device, Node, Part, Pool } from './types';
import { IRow, Rows } from './virtual';

const TILE = { width: 230, height: 88, note: 18, gap: 6 };
const NODE_HEIGHT = 28;

/** Say how much is free, in one line. */
export function Free(props: { pool: Pool; trans: TranslationBundle }): JSX.Element {
  const { pool, trans } = props;
  const free = trans.__('%1 of %2 GPUs free', gpus(pool.gpus_free), pool.gpus);
  return (
    <div className="jp-gpupool-Free" role="status" aria-live="polite">
      <strong>{free}</strong>
      <span>{trans.__('largest together: %1', pool.largest_together)}</span>
      {pool.pending > 0 && <span>{trans._n('%1 request waits', '%1 requests wait', pool.pending)}</span>}
    </div>
  );
}

/** The panel. */
export function PoolView(props: IViewProps): JSX.Element {
  return (
    <Loaded {...props} topics={['pool', 'devices']}>
      {() => <Tiles {...props} />}
    </Loaded>
  );
}

function Tiles(props: IViewProps): JSX.Element {
  const { model, trans } = props;
  const [width, setWidth] = React.useState(0);
  const [chosen, setChosen] = React.useState('');
  const list = React.useRef<Rows>(null);
  const me = model.pool?.user.name ?? '';
  const columns = Math.max(1, Math.floor((width + TILE.gap) / (TILE.width + TILE.gap)));
  const focus = chosen || (model.devices[0]?.uuid ?? '');
  if (!model.devices.length) {
    return <Nothing>{trans.__('The pool has no GPUs yet: no node has joined.')}</Nothing>;
  }
  const choose = (uuid: string): void => setChosen(uuid === chosen ? '' : uuid);
  const draw = (device: Device): JSX.Element => (
    <Tile
      key={device.uuid}
      {...{ device, me, trans, choose }}
      chosen={device.uuid === chosen}
      reachable={device.uuid === focus}
    />
  );
  const rows = layOut(model.devices, model.pool?.nodes ?? [], columns, draw, trans);
  const onKeyDown = (event: React.KeyboardEvent): void => {
    const steps: Record<string, number> = {
      ArrowRight: 1,
      ArrowLeft: -1,
      ArrowDown: columns,
      ArrowUp: -columns,
      Home: -model.devices.length,
      End: model.devices.length
    };
    const step = steps[event.key];
    if (step === undefined) {
      return;
    }
    event.preventDefault();
    const at = model.devices.findIndex(each => each.uuid === focus);
    const next = model.devices[Math.min(model.devices.length - 1, Math.max(0, at + step))];
    if (next) {
      setChosen(next.uuid);
      list.current?.reveal(rows.find(row => row.uuids.includes(next.uuid))?.key ?? '');
      requestAnimationFrame(() => document.getElementById(`jp-gpupool-${next.uuid}`)?.focus());
    }
  };
  const device = model.devices.find(each => each.uuid === chosen);
  return (
    <div className="jp-gpupool-Pool" onKeyDown={onKeyDown}>
      <Rows ref={list} rows={rows} onWidth={setWidth} />
      {device && <Details {...{ device, me, trans }} close={() => setChosen('')} />}
    </div>
  );
}

type TileRow = IRow & { uuids: string[] };

/** Put devices into rows: a heading a node, then its tiles. */
function layOut(
  devices: readonly Device[],
  nodes: readonly Node[],
  columns: number,
  draw: (device: Device) => JSX.Element,
  trans: TranslationBundle
): TileRow[] {
  const rows: TileRow[] = [];
  let at = 0;
  while (at < devices.length) {
    const name = devices[at]!.node;
    const node = nodes.find(each => each.name === name);
    let end = at;
    while (end < devices.length && devices[end]!.node === name) {
      end += 1;
    }
    const own = devices.slice(at, end);
    const head = (): JSX.Element => <Heading {...{ name, node, own, trans }} />;
    rows.push({ key: `node ${name}`, height: NODE_HEIGHT, draw: head, uuids: [] });
    for (let start = 0; start < own.length; start += columns) {
      const few = own.slice(start, start + columns);
      const height = TILE.height + (few.some(each => note(each)) ? TILE.note : 0) + TILE.gap;
      const line = (): JSX.Element => (
        <div
          className="jp-gpupool-Tiles"
          style={{ gridTemplateColumns: `repeat(${columns}, minmax(0, 1fr))` }}
        >
          {few.map(draw)}
        </div>
      );
      rows.push({ key: few[0]!.uuid, height, draw: line, uuids: few.map(each => each.uuid) });
    }
    at = end;
  }
  return rows;
}

function Heading(props: {
  name: string;
  node: Node | undefined;
  own: Device[];
  trans: TranslationBundle;
}): JSX.Element {
  const { name, node, own, trans } = props;
  const free = own.reduce((sum, each) => sum + each.free_milli, 0) / 1000;
  const state =
    node?.state === 'lost' ? trans.__('lost') : node?.state === 'silent' ? trans.__('does not answer') : '';
  return (
    <h3 className="jp-gpupool-Node" title={node?.address}>
      <span>{name}</span>
      {state && <span className="jp-gpupool-Chip jp-mod-bad">{`✕ ${state}`}</span>}
      {node?.cordoned && (
        <span className="jp-gpupool-Chip jp-mod-warn">
          {node.retired ? trans.__('retired') : trans.__('cordoned')}
        </span>
      )}
      <span className="jp-gpupool-Node-free">{trans.__('%1 of %2 free', gpus(free), own.length)}</span>
    </h3>
  );
}

/** What a tile says in its last line, if it needs one. */
function note(device: Device): string {
  if (device.verdict !== 'fine' && device.verdict_sentence) {
    return device.verdict_sentence;
  }
  return device.cordoned || device.outside || device.reading?.error || '';
}

interface ITileProps {
  device: Device;
  me: string;
  chosen: boolean;
  reachable: boolean;
  choose: (uuid: string) => void;
  trans: TranslationBundle;
}

const Tile = React.memo(
  function Tile(props: ITileProps): JSX.Element {
    const { device, me, chosen, trans } = props;
    const { sign, word, mood } = state(device, trans);
    const reading = device.reading;
    return (
      <button
        id={`jp-gpupool-${device.uuid}`}
        className={`jp-gpupool-Tile jp-mod-${mood}`}
        aria-expanded={chosen}
        tabIndex={props.reachable ? 0 : -1}
        onClick={() => props.choose(device.uuid)}
      >
        <span className="jp-gpupool-Tile-head">
          <strong>{device.name.split('/').pop()}</strong>
          <span className="jp-gpupool-Tile-model">{device.model}</span>
          <span className={`jp-gpupool-Chip jp-mod-${mood}`}>{`${sign} ${word}`}</span>
        </span>
        <Bar {...{ device, me, trans }} />
        <span className="jp-gpupool-Tile-meters">
          <Meter
            label={trans.__('Use')}
            value={reading?.utilisation ?? 0}
            most={100}
            text={reading?.utilisation == null ? '–' : `${Math.round(reading.utilisation)} %`}
          />
          <Meter
            label={trans.__('Mem')}
            value={reading?.memory_used ?? 0}
            most={device.memory}
            text={
              reading?.memory_used == null
                ? gigabytes(device.memory) + ' GB'
                : `${gigabytes(reading.memory_used)}/${gigabytes(device.memory)} GB`
            }
          />
        </span>
        <span className="jp-gpupool-Tile-foot">
          {reading?.temperature != null && <span>{`${Math.round(reading.temperature)} °C`}</span>}
          {reading?.power != null && <span>{`${Math.round(reading.power)} W`}</span>}
          <span className="jp-gpupool-Tile-owners">{owners(device, me, trans)}</span>
        </span>
        {note(device) && <span className="jp-gpupool-Tile-note">{note(device)}</span>}
      </button>
    );
  },
  (before, after) =>
    before.device === after.device &&
    before.me === after.me &&
    before.chosen === after.chosen &&
    before.reachable === after.reachable
);

/** How a device is, in a sign and a word: what keeps work off it goes before its verdict. */
export function state(
  device: Device,
  trans: TranslationBundle
): { sign: string; word: string; mood: string } {
  if (device.flags.includes('retired') && device.verdict === 'fine') {
    return { sign: '⊗', word: trans.__('retired'), mood: 'warn' };
  }
  if (device.cordoned && device.verdict === 'fine') {
    return { sign: '⊘', word: trans.__('cordoned'), mood: 'warn' };
  }
  if (device.outside && device.verdict === 'fine') {
    return { sign: '!', word: trans.__('in use outside'), mood: 'warn' };
  }
  return verdicts(trans)[device.verdict];
}

/** Who has parts of a device, in words. */
function owners(device: Device, me: string, trans: TranslationBundle): string {
  const shares = new Map<string, number>();
  device.parts.forEach(each => shares.set(each.user, (shares.get(each.user) ?? 0) + each.milli));
  const words = [...shares].map(([user, milli]) => {
    const name = user === me ? trans.__('you') : user;
    return milli >= 1000 ? name : `${name} ${percent(milli)}`;
  });
  if (device.free_milli > 0) {
    words.push(
      device.free_milli >= 1000 ? trans.__('free') : trans.__('free %1', percent(device.free_milli))
    );
  }
  return words.join(', ') || trans.__('not free');
}

function percent(milli: number): string {
  return `${Math.round(milli / 10)} %`;
}

/** The slices of a device in proportion; mine stand out by a frame and a word, not by colour alone. */
function Bar(props: { device: Device; me: string; trans: TranslationBundle }): JSX.Element {
  const { device, me, trans } = props;
  const parts = [...device.parts].sort((one, other) => (one.start ?? 0) - (other.start ?? 0));
  const taken = parts.reduce((sum, each) => sum + each.milli, 0);
  const out = device.free_milli === 0 && taken < 1000;
  return (
    <span className="jp-gpupool-Bar" aria-hidden="true">
      {parts.map(each => (
        <span
          key={each.slice || `${each.user}${each.start}`}
          className={`jp-gpupool-Bar-part${each.user === me ? ' jp-mod-mine' : ''} jp-mod-${each.state}`}
          style={{ flexGrow: each.milli }}
          title={partWords(each, trans)}
        >
          {each.profile || (each.user === me ? trans.__('you') : each.user)}
        </span>
      ))}
      {taken < 1000 && (
        <span className={`jp-gpupool-Bar-free${out ? ' jp-mod-out' : ''}`} style={{ flexGrow: 1000 - taken }}>
          {out ? '' : trans.__('free')}
        </span>
      )}
    </span>
  );
}

function partWords(part: Part, trans: TranslationBundle): string {
  const what = part.profile || (part.milli >= 1000 ? trans.__('whole GPU') : percent(part.milli));
  const memory = part.vram ? `, ${gigabytes(part.vram)} GB` : '';
  const lease = part.lease_name ? ` (${part.lease_name})` : '';
  return `${part.user}${lease}: ${what}${memory}, ${part.state}`;
}

function Details(props: {
  device: Device;
  me: string;
  trans: TranslationBundle;
  close: () => void;
}): JSX.Element {
  const { device, trans } = props;
  const { sign, word } = state(device, trans);
  const rows: [string, string][] = [
    [trans.__('Model'), `${device.model}, ${gigabytes(device.memory)} GB${device.mig ? ', MIG' : ''}`],
    [trans.__('Health'), `${sign} ${word}${device.verdict_sentence ? `: ${device.verdict_sentence}` : ''}`],
    ...device.parts.map((each): [string, string] => [trans.__('In use'), partWords(each, trans)]),
    ...(device.cordoned ? [[trans.__('Cordoned'), device.cordoned] as [string, string]] : []),
    ...(device.outside ? [[trans.__('In use outside the pool'), device.outside] as [string, string]] : []),
    ['UUID', device.uuid]
  ];
  return (
    <section className="jp-gpupool-Details" aria-label={trans.__('Details of %1', device.name)}>
      <div className="jp-gpupool-Head">
        <strong>{device.name}</strong>
        <button
          className="jp-gpupool-Button jp-mod-plain"
          onClick={props.close}
          aria-label={trans.__('Close details')}
        >
          ×
        </button>
      </div>
      <dl>
        {rows.map(([name, text], n) => (
          <React.Fragment key={n}>
            <dt>{name}</dt>
            <dd>{text}</dd>
          </React.Fragment>
        ))}
      </dl>
    </section>
  );
}
