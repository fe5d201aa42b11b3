/**
 * The panel of my leases: how each stands, and what can be done with it.
 *
 * Actions are data: a table of commands, each with when it makes sense. Questions are asked by the commands.
 */

import type { TranslationBundle } from '@jupyterlab/translation';
import React from 'react';

import { clock, duration, gigabytes, gpus } from './format';
import { Button, IViewProps, Loaded, Meter, Nothing, Progress } from './parts';
import { forbidden, Need } from './rights';
import { CommandIDs } from './tokens';
import type { Device, Lease, LeaseState, Slice } from './types';

/** Less than so many seconds left is worth a word. */
const SOON_S = 15 * 60;
/** So many ended leases are listed, folded away. */
const PAST = 10;

/** Words and signs of a lease's state. */
export function states(
  trans: TranslationBundle
): Record<LeaseState, { sign: string; word: string; mood: string }> {
  return {
    pending: { sign: '◷', word: trans.__('waiting'), mood: 'warn' },
    starting: { sign: '…', word: trans.__('starting'), mood: 'warn' },
    active: { sign: '●', word: trans.__('active'), mood: 'good' },
    draining: { sign: '↓', word: trans.__('ending'), mood: 'warn' },
    suspended: { sign: '⏸', word: trans.__('suspended'), mood: 'warn' },
    ended: { sign: '■', word: trans.__('ended'), mood: 'plain' }
  };
}

/** How a lease stands, in a sign and words. */
export function standing(
  lease: Lease,
  trans: TranslationBundle
): { sign: string; word: string; mood: string } {
  const known = states(trans);
  return lease.suspending ? { ...known.suspended, word: trans.__('being suspended') } : known[lease.state];
}

interface IAction {
  command: string;
  args?: Record<string, string>;
  label: (trans: TranslationBundle) => string;
  when: readonly LeaseState[];
  /** What the server has to allow for it, besides reading. */
  needs?: Need;
  /** Only the owner can do it. */
  own?: boolean;
  main?: boolean;
}

const RUNS: readonly LeaseState[] = ['starting', 'active'];
const ACTIONS: readonly IAction[] = [
  { command: CommandIDs.use, label: trans => trans.__('Use in notebook'), when: ['active'], main: true },
  {
    command: CommandIDs.dashboard,
    label: trans => trans.__('Dask dashboard'),
    when: ['active'],
    needs: 'execute'
  },
  {
    command: CommandIDs.extend,
    label: trans => trans.__('Extend'),
    when: RUNS,
    needs: 'write',
    own: true
  },
  {
    command: CommandIDs.logs,
    label: trans => trans.__('Logs'),
    when: [...RUNS, 'draining', 'suspended', 'ended']
  },
  {
    command: CommandIDs.share,
    label: trans => trans.__('Share'),
    when: ['active'],
    needs: 'write',
    own: true
  },
  { command: CommandIDs.explain, label: trans => trans.__('Why?'), when: ['pending', 'suspended'] },
  {
    command: CommandIDs.release,
    label: trans => trans.__('Release'),
    when: [...RUNS, 'suspended'],
    needs: 'write',
    own: true
  },
  {
    command: CommandIDs.release,
    label: trans => trans.__('Withdraw'),
    when: ['pending'],
    needs: 'write',
    own: true
  }
];

/** The panel. */
export function LeasesView(props: IViewProps): JSX.Element {
  const { model, trans } = props;
  return (
    <Loaded {...props} topics={['pool', 'leases']}>
      {() => {
        const live = model.leases.filter(each => each.state !== 'ended');
        const past = model.leases.filter(each => each.state === 'ended').slice(0, PAST);
        return (
          <div className="jp-gpupool-Leases">
            {live.length === 0 && (
              <Nothing>{trans.__('You have no GPUs. Request some: it takes a moment.')}</Nothing>
            )}
            <ul>
              {live.map(each => (
                <LeaseCard key={each.id} {...props} lease={each} />
              ))}
            </ul>
            {past.length > 0 && (
              <details>
                <summary>{trans.__('Ended')}</summary>
                <ul>
                  {past.map(each => (
                    <Past key={each.id} lease={each} now={model.now()} trans={trans} />
                  ))}
                </ul>
              </details>
            )}
          </div>
        );
      }}
    </Loaded>
  );
}

/** One lease. */
export function LeaseCard(props: IViewProps & { lease: Lease }): JSX.Element {
  const { lease, model, trans } = props;
  const now = model.now();
  const { sign, word, mood } = standing(lease, trans);
  const mine = lease.user === model.pool?.user.name;
  return (
    <li className={`jp-gpupool-Lease jp-mod-${mood}`} aria-label={trans.__('Lease %1, %2', lease.name, word)}>
      <div className="jp-gpupool-Head">
        <strong>{lease.name}</strong>
        <span className={`jp-gpupool-Chip jp-mod-${mood}`}>{`${sign} ${word}`}</span>
        <span className="jp-gpupool-Lease-size">{size(lease, trans)}</span>
      </div>
      {!mine && <p className="jp-gpupool-small">{trans.__('of %1', lease.user)}</p>}
      <Standing lease={lease} now={now} trans={trans} />
      {idle(lease, now) > 0 && (
        <p className="jp-gpupool-Lease-idle" role="status">
          {`⚠ ${trans.__('Idle for %1: it ends if it stays so.', duration(idle(lease, now)))} `}
          <Button
            label={trans.__('Keep')}
            press={() => void props.commands.execute(CommandIDs.keep, { lease: lease.id })}
            off={forbidden(model, 'write', trans)}
          />
        </p>
      )}
      {lease.holds.count > 0 && !lease.interactive && (
        <p className="jp-gpupool-small">
          {trans.__(
            'If it is suspended for others, scattered data and actors are lost: %1 MB.',
            Math.ceil(lease.holds.size / 1e6)
          )}
        </p>
      )}
      {lease.slices.length > 0 && (
        <ul className="jp-gpupool-Slices">
          {lease.slices.map(each => (
            <SliceLine key={each.id} slice={each} device={find(model.devices, each.device)} trans={trans} />
          ))}
        </ul>
      )}
      {lease.shared_with.length > 0 && (
        <p className="jp-gpupool-small">{trans.__('Shared with %1', lease.shared_with.join(', '))}</p>
      )}
      <Actions {...props} mine={mine} />
    </li>
  );
}

/** For how many seconds a lease has been idle, once that is worth a warning; before, 0. */
export function idle(lease: Lease, now: number): number {
  const timeout = lease.idle_timeout;
  const since = lease.idle_since === null || lease.state !== 'active' ? 0 : now - lease.idle_since;
  return timeout > 0 && since >= timeout / 2 ? since : 0;
}

function find(devices: readonly Device[], uuid: string): Device | undefined {
  return devices.find(each => each.uuid === uuid);
}

function size(lease: Lease, trans: TranslationBundle): string {
  const profile = lease.slices[0]?.profile || (lease.requested.mig as string | undefined);
  return profile || trans._n('%2 GPU', '%2 GPUs', lease.gpus, gpus(lease.gpus));
}

/** How far it is, or how long it lasts, in one line. */
function Standing(props: { lease: Lease; now: number; trans: TranslationBundle }): JSX.Element {
  const { lease, now, trans } = props;
  const { scheduler, workers, of } = lease.progress;
  if (lease.state === 'starting') {
    const text = scheduler
      ? trans.__('%1 of %2 workers are up', workers, of)
      : trans.__('its scheduler starts');
    return (
      <>
        <Progress
          label={trans.__('Start of %1', lease.name)}
          done={(scheduler ? 1 : 0) + workers}
          of={of + 1}
        />
        <p className="jp-gpupool-small">{text}</p>
      </>
    );
  }
  if (lease.state === 'pending' || lease.state === 'suspended') {
    const place = lease.place ? trans.__('Place %1. ', lease.place) : '';
    const start = lease.expected_start
      ? trans.__(
          'Starts about %1 (in %2). ',
          clock(lease.expected_start, now),
          duration(lease.expected_start - now)
        )
      : '';
    return <p className="jp-gpupool-small">{`${place}${start}${lease.why}`}</p>;
  }
  if (lease.ends_at === null || lease.state !== 'active') {
    return (
      <p className="jp-gpupool-small">{lease.state === 'active' ? trans.__('No time limit') : lease.why}</p>
    );
  }
  const left = lease.ends_at - now;
  const text = trans.__('%1 left, until %2', duration(left), clock(lease.ends_at, now));
  return (
    <p className={`jp-gpupool-small${left < SOON_S ? ' jp-mod-warn' : ''}`}>
      {left < SOON_S ? `⚠ ${text}` : text}
    </p>
  );
}

function SliceLine(props: {
  slice: Slice;
  device: Device | undefined;
  trans: TranslationBundle;
}): JSX.Element {
  const { slice, device, trans } = props;
  const reading = device?.reading;
  const running = slice.state === 'running';
  return (
    <li>
      <span className="jp-gpupool-Slices-name" title={slice.device}>
        {slice.device_name} {slice.milli < 1000 ? slice.profile || `${Math.round(slice.milli / 10)} %` : ''}
        {!running && <em>{` ${slice.state}`}</em>}
      </span>
      {slice.limits.length > 0 && (
        <span className="jp-gpupool-small" title={slice.limits.map(each => each.sentence).join('\n')}>
          {trans.__('limited by %1', slice.limits.map(each => each.layer).join(', '))}
        </span>
      )}
      {reading && (
        <span className="jp-gpupool-Tile-meters">
          <Meter
            label={trans.__('Use')}
            value={reading.utilisation ?? 0}
            most={100}
            text={reading.utilisation === null ? '–' : `${Math.round(reading.utilisation)} %`}
          />
          <Meter
            label={trans.__('Mem')}
            value={reading.memory_used ?? 0}
            most={device.memory}
            text={`${gigabytes(reading.memory_used ?? 0)}/${gigabytes(device.memory)} GB`}
          />
        </span>
      )}
    </li>
  );
}

function Actions(props: IViewProps & { lease: Lease; mine: boolean }): JSX.Element {
  const { lease, mine, commands, trans, model } = props;
  const admin = model.pool?.user.admin ?? false;
  const fit = ACTIONS.filter(
    each =>
      each.when.includes(lease.suspending ? 'suspended' : lease.state) &&
      (mine ||
        !each.own ||
        (admin && [CommandIDs.release, CommandIDs.extend].includes(each.command as never)))
  );
  return (
    <div className="jp-gpupool-Actions" role="group" aria-label={trans.__('Actions on %1', lease.name)}>
      {fit.map(each => (
        <Button
          key={each.label(trans)}
          label={each.label(trans)}
          press={() => void commands.execute(each.command, { lease: lease.id })}
          off={each.needs && forbidden(model, each.needs, trans)}
          main={each.main}
        />
      ))}
    </div>
  );
}

function Past(props: { lease: Lease; now: number; trans: TranslationBundle }): JSX.Element {
  const { lease, now, trans } = props;
  const time =
    lease.granted_at && lease.ended_at
      ? duration(lease.ended_at - lease.granted_at)
      : trans.__('not started');
  return (
    <li className="jp-gpupool-Past">
      <strong>{lease.name}</strong>
      <span>{` ${size(lease, trans)}, ${time}`}</span>
      <span className="jp-gpupool-small">
        {` ${lease.ended_at ? clock(lease.ended_at, now) : ''} ${lease.why}`}
      </span>
    </li>
  );
}
