/**
 * What a device's verdict rests on: the rule, the times, the driver's errors, and what was read.
 *
 * Rule 1: it is read when somebody opens it, and again when the verdict has changed; never by the clock.
 * Rule 2: what a driver does not say has no column, and what it says nothing unusual about still has its figure.
 */

import type { TranslationBundle } from '@jupyterlab/translation';
import React from 'react';

import { clock, gigabytes } from './format';
import { Fault, IViewProps, Nothing } from './parts';
import { Problem } from './request';
import type { Device, Evidence, Grounds, Incident, Sample } from './types';

/** A column of the readings: its heading, and its text; null: this reading does not say. */
export interface IColumn {
  id: string;
  label: string;
  text: (sample: Sample) => string | null;
}

/** Bits of the clocks' reasons that mean "slower than it should be". */
const SLOW: readonly [number, (trans: TranslationBundle) => string][] = [
  [0x8, trans => trans.__('hardware')],
  [0x40, trans => trans.__('heat')],
  [0x80, trans => trans.__('power brake')]
];

/** What the driver recommends, by its number. */
const ACTIONS: readonly ((trans: TranslationBundle) => string)[] = [
  trans => trans.__('none'),
  trans => trans.__('reset the GPU'),
  trans => trans.__('reboot the node'),
  trans => trans.__('drain its links'),
  trans => trans.__('drain and reset it'),
  trans => trans.__('recover its domain'),
  trans => trans.__('reset its bus'),
  trans => trans.__('reboot the system')
];

/** The columns of the readings, in their order. */
export function columns(trans: TranslationBundle, now: number): IColumn[] {
  const plain = (value: number | null | undefined, unit: string): string | null =>
    value === null || value === undefined ? null : `${value}${unit}`;
  const truth = (value: boolean | null | undefined): string | null =>
    value === null || value === undefined ? null : value ? trans.__('yes') : trans.__('no');
  return [
    { id: 'now', label: trans.__('Read at'), text: each => moment(each.now, now) || null },
    { id: 'error', label: trans.__('The driver says'), text: each => each.error || null },
    { id: 'recovery', label: trans.__('It recommends'), text: each => recommended(each, trans) },
    { id: 'temperature', label: trans.__('Heat'), text: each => plain(each.temperature, ' °C') },
    { id: 'utilisation', label: trans.__('Use'), text: each => plain(each.utilisation, ' %') },
    {
      id: 'memory',
      label: trans.__('Memory'),
      text: each => (each.memory_used == null ? null : `${gigabytes(each.memory_used)} GB`)
    },
    {
      id: 'power',
      label: trans.__('Power'),
      text: each => (each.power == null ? null : `${Math.round(each.power / 1000)} W`)
    },
    { id: 'ecc', label: trans.__('Memory errors'), text: each => plain(each.ecc_uncorrected, '') },
    { id: 'pending', label: trans.__('Row to be replaced'), text: each => truth(each.remap_pending) },
    { id: 'failed', label: trans.__('Row not replaced'), text: each => truth(each.remap_failed) },
    { id: 'slowdown', label: trans.__('Slowed down by'), text: each => slowed(each, trans) },
    { id: 'width', label: trans.__('PCIe lanes'), text: each => plain(each.pcie_width, '') },
    {
      id: 'links',
      label: trans.__('NVLinks up'),
      text: each =>
        each.nvlinks ? trans.__('%1 of %2', each.nvlinks.filter(Boolean).length, each.nvlinks.length) : null
    },
    { id: 'link_errors', label: trans.__('NVLink errors'), text: each => plain(each.nvlink_errors, '') }
  ];
}

function recommended(sample: Sample, trans: TranslationBundle): string | null {
  const action = sample.recovery_action;
  return action == null ? null : (ACTIONS[action]?.(trans) ?? trans.__('action %1', action));
}

function slowed(sample: Sample, trans: TranslationBundle): string | null {
  const bits = sample.slowdown;
  if (bits == null) {
    return null;
  }
  const causes = SLOW.filter(([bit]) => bits & bit).map(([, word]) => word(trans));
  return causes.join(', ') || trans.__('none');
}

/** Milliseconds of the node's clock as a time to the second; empty: it is not known. */
function moment(ms: number | undefined, now: number): string {
  return ms ? clock(ms / 1000, now, true) : '';
}

/** One error of the driver's in words: what, when, how often, where, and whose programs were there. */
export function incidentWords(each: Incident, trans: TranslationBundle, now: number): string {
  const what = `${(each.labels ?? []).join(', ')} (${each.meaning ?? '?'})`;
  const [first, last] = [moment(each.first, now), moment(each.last, now)];
  const times =
    (each.count ?? 1) > 1
      ? trans.__('%1 times, from %2 to %3', each.count, first, last)
      : trans.__('once, at %1', first);
  const where = (each.instance ?? -1) >= 0 ? trans.__('on the MIG instance %1', each.instance) : '';
  const whose = each.programs?.length ? trans.__('under programs of %1', each.programs.join(', ')) : '';
  return [`${what}: ${times}`, where, whose].filter(Boolean).join(', ');
}

/** Facts beside the errors and readings, as pairs of a name and words. */
export function facts(said: Evidence, trans: TranslationBundle, now: number): [string, string][] {
  const found: Grounds = said.evidence;
  const since = moment(found.since, now);
  const rule = found.rule && (since ? trans.__('“%1”, since %2', found.rule, since) : `“${found.rule}”`);
  const strikes = (found.strikes ?? []).map(each => moment(each, now)).join(', ');
  const errors = (found.memory_errors ?? []).map(each =>
    trans.__('%1 between %2 and %3', each[2], moment(each[0], now), moment(each[1], now))
  );
  const rows: [string, string | undefined][] = [
    [trans.__('Rule'), rule],
    [trans.__('The driver says'), found.error],
    [trans.__('New memory errors'), errors.join('; ')],
    [trans.__('Taken out within a week'), strikes],
    [trans.__('On probation until'), said.probation ? moment(found.probation_until, now) : ''],
    [trans.__('Takes no new work'), said.cordoned]
  ];
  return rows.filter((each): each is [string, string] => Boolean(each[1]));
}

/** What a verdict rests on, folded away until somebody wants to see it. */
export function EvidenceOf(props: IViewProps & { device: Device }): JSX.Element {
  const { device, trans } = props;
  const [open, setOpen] = React.useState(false);
  return (
    <details className="jp-gpupool-Evidence" onToggle={event => setOpen(event.currentTarget.open)}>
      <summary aria-label={trans.__('What the verdict on %1 rests on', device.name)}>
        {trans.__('What this rests on')}
      </summary>
      {open && <Opened {...props} />}
    </details>
  );
}

/** Reads the evidence; error, then loading, then data. */
function Opened(props: IViewProps & { device: Device }): JSX.Element {
  const { device, model, trans } = props;
  const [said, setSaid] = React.useState<Evidence | Problem | null>(null);
  const [tries, setTries] = React.useState(0);
  // Readings change all the time; what is judged by them is read anew when the judgement is another.
  const stand = [device.verdict, device.verdict_sentence, ...device.flags, device.cordoned].join('\n');
  React.useEffect(() => {
    let wanted = true;
    model.evidence(device.uuid).then(
      found => wanted && setSaid(found),
      (error: unknown) => wanted && setSaid(Problem.of(error))
    );
    return () => {
      wanted = false;
    };
  }, [model, device.uuid, stand, tries]);
  if (said instanceof Problem) {
    return <Fault problem={said} trans={trans} again={() => setTries(tries + 1)} />;
  }
  return said ? <Shown {...props} said={said} /> : <Nothing>{trans.__('Reading…')}</Nothing>;
}

function Shown(props: IViewProps & { said: Evidence }): JSX.Element {
  const { said, model, trans } = props;
  const now = model.now();
  const rows = facts(said, trans, now);
  const incidents = [...(said.evidence.incidents ?? [])].reverse();
  const readings = [...(said.evidence.readings ?? [])].reverse();
  if (!rows.length && !incidents.length && !readings.length) {
    return <Nothing>{trans.__('Nothing has been noticed about it.')}</Nothing>;
  }
  return (
    <>
      <dl>
        {rows.map(([name, text]) => (
          <React.Fragment key={name}>
            <dt>{name}</dt>
            <dd>{text}</dd>
          </React.Fragment>
        ))}
      </dl>
      {incidents.length > 0 && (
        <ul aria-label={trans.__('Errors that the driver has told, the latest first')}>
          {incidents.map((each, n) => (
            <li key={n}>{incidentWords(each, trans, now)}</li>
          ))}
        </ul>
      )}
      {readings.length > 0 && <Readings {...{ said, readings, trans, now }} />}
    </>
  );
}

/** The last readings: a figure each row, a reading each column, so that they fit a narrow sidebar. */
function Readings(props: {
  said: Evidence;
  readings: readonly Sample[];
  trans: TranslationBundle;
  now: number;
}): JSX.Element {
  const { said, readings, trans, now } = props;
  const [head, ...rest] = columns(trans, now);
  const told = rest.filter(column => readings.some(each => column.text(each) !== null));
  return (
    // A region that scrolls must be reachable by keyboard.
    <div className="jp-gpupool-Readings" role="region" aria-label={readingsOf(said, trans)} tabIndex={0}>
      <table>
        <caption>{trans.__('Read when it was judged, the latest first')}</caption>
        <thead>
          <tr>
            <th scope="col">{head!.label}</th>
            {readings.map((each, n) => (
              <th key={n} scope="col">
                {head!.text(each) ?? '–'}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {told.map(column => (
            <tr key={column.id}>
              <th scope="row">{column.label}</th>
              {readings.map((each, n) => (
                <td key={n}>{column.text(each) ?? '–'}</td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

function readingsOf(said: Evidence, trans: TranslationBundle): string {
  return trans.__('Readings of %1', said.name);
}
