/**
 * The Health panel: devices and nodes that are not well first, with the reason in words; administrators act here.
 */

import type { TranslationBundle } from '@jupyterlab/translation';
import React from 'react';

import { EvidenceOf } from './evidence';
import { Button, IViewProps, Loaded, Nothing } from './parts';
import { state } from './pool';
import { forbidden } from './rights';
import { LeaseCard } from './leases';
import { CommandIDs } from './tokens';
import type { Device, HealthAction, Node, Verdict } from './types';

/** From worst to best. */
const ORDER: readonly Verdict[] = ['gone', 'evacuate', 'retire_soon', 'restart_worker', 'watch', 'fine'];

/** The panel. */
export function HealthView(props: IViewProps): JSX.Element {
  const { model, trans } = props;
  return (
    <Loaded {...props} topics={['pool', 'devices']}>
      {() => {
        const admin = model.pool?.user.admin ?? false;
        const ill = model.devices.filter(each => !well(each)).sort(byVerdict);
        const fine = model.devices.filter(well);
        return (
          <div className="jp-gpupool-Health">
            {ill.length === 0 ? (
              <Nothing>{`✓ ${trans._n('The GPU is fine.', 'All %1 GPUs are fine.', fine.length)}`}</Nothing>
            ) : (
              <ul>
                {ill.map(each => (
                  <DeviceHealth key={each.uuid} {...props} device={each} admin={admin} />
                ))}
              </ul>
            )}
            <Nodes {...props} admin={admin} />
            {ill.length > 0 && fine.length > 0 && (
              <Nothing>{`✓ ${trans._n('%1 other GPU is fine.', '%1 other GPUs are fine.', fine.length)}`}</Nothing>
            )}
            {admin && <Fine {...props} devices={fine} />}
            {admin && <Everyone {...props} />}
          </div>
        );
      }}
    </Loaded>
  );
}

function well(device: Device): boolean {
  const flags = device.cordoned || device.outside || device.flags.includes('probation');
  return device.verdict === 'fine' && !flags && !device.reading?.error;
}

function byVerdict(one: Device, other: Device): number {
  return ORDER.indexOf(one.verdict) - ORDER.indexOf(other.verdict) || one.name.localeCompare(other.name);
}

function DeviceHealth(props: IViewProps & { device: Device; admin: boolean }): JSX.Element {
  const { device, admin, trans } = props;
  const { sign, word, mood } = state(device, trans);
  const words = [
    device.verdict_sentence,
    device.outside && trans.__('In use outside the pool (%1)', device.outside),
    device.reading?.error && trans.__('The driver says: %1', device.reading.error)
  ].filter(Boolean);
  return (
    <li className={`jp-gpupool-Ill jp-mod-${mood}`}>
      <div className="jp-gpupool-Head">
        <strong>{device.name}</strong>
        <span className={`jp-gpupool-Chip jp-mod-${mood}`}>{`${sign} ${word}`}</span>
        {device.flags.includes('probation') && (
          <span className="jp-gpupool-Chip">{trans.__('on probation')}</span>
        )}
      </div>
      {words.map((each, n) => (
        <p key={n}>{each}</p>
      ))}
      {device.cordoned && <p>{trans.__('Takes no new work: %1', device.cordoned)}</p>}
      <EvidenceOf {...props} />
      {admin && (
        <Orders
          {...props}
          target={device.uuid}
          name={device.name}
          out={device.cordoned !== '' || mood === 'bad'}
        />
      )}
    </li>
  );
}

/** What an administrator can order for a device or node. */
function Orders(props: IViewProps & { target: string; name: string; out: boolean }): JSX.Element {
  const { target, name, commands, model, trans } = props;
  const orders: [HealthAction, string][] = props.out
    ? [['undrain', trans.__('Back into service')]]
    : [
        ['cordon', trans.__('Cordon')],
        ['drain', trans.__('Drain')],
        ['retire', trans.__('Retire')]
      ];
  return (
    <span className="jp-gpupool-Actions" role="group" aria-label={trans.__('Orders for %1', name)}>
      {orders.map(([action, label]) => (
        <Button
          key={action}
          label={label}
          press={() => void commands.execute(CommandIDs.health, { target, name, action })}
          off={forbidden(model, 'write', trans)}
        />
      ))}
    </span>
  );
}

function Nodes(props: IViewProps & { admin: boolean }): JSX.Element {
  const { model, trans, admin } = props;
  const words: Record<Node['state'], string> = {
    up: `✓ ${trans.__('up')}`,
    silent: `… ${trans.__('does not answer')}`,
    lost: `✕ ${trans.__('lost')}`
  };
  return (
    <>
      <h3>{trans.__('Nodes')}</h3>
      <ul className="jp-gpupool-Nodes">
        {(model.pool?.nodes ?? []).map(node => (
          <li key={node.name}>
            <strong>{node.name}</strong>
            <span className={`jp-gpupool-Chip jp-mod-${node.state === 'up' ? 'good' : 'bad'}`}>
              {words[node.state]}
            </span>
            {node.cordoned && (
              <span className="jp-gpupool-small">
                {node.retired ? node.cordoned : trans.__('cordoned: %1', node.cordoned)}
              </span>
            )}
            {admin && <Orders {...props} target={node.name} name={node.name} out={node.cordoned !== ''} />}
          </li>
        ))}
      </ul>
    </>
  );
}

/** Devices that are fine, for administrators to take out; folded away. */
function Fine(props: IViewProps & { devices: readonly Device[] }): JSX.Element {
  const { devices, trans } = props;
  const [open, setOpen] = React.useState(false);
  return (
    <details onToggle={event => setOpen(event.currentTarget.open)}>
      <summary>{trans.__('Take a GPU out of service')}</summary>
      {open && (
        <ul>
          {devices.map(each => (
            <li key={each.uuid} className="jp-gpupool-Nodes-device">
              <span>{each.name}</span>
              <Orders {...props} target={each.uuid} name={each.name} out={false} />
            </li>
          ))}
        </ul>
      )}
    </details>
  );
}

/** Everybody's leases, read only while they are looked at. */
function Everyone(props: IViewProps): JSX.Element {
  const { model, trans } = props;
  const [open, setOpen] = React.useState(false);
  React.useEffect(() => {
    if (!open) {
      return undefined;
    }
    const watch = model.watch('everyone');
    return () => watch.dispose();
  }, [model, open]);
  return (
    <details onToggle={event => setOpen(event.currentTarget.open)}>
      <summary>{trans.__("Everybody's leases")}</summary>
      {open && <Others {...props} trans={trans} />}
    </details>
  );
}

function Others(props: IViewProps & { trans: TranslationBundle }): JSX.Element {
  const { model, trans } = props;
  const live = model.everyone.filter(each => each.state !== 'ended');
  return live.length === 0 ? (
    <Nothing>{trans.__('Nobody has GPUs.')}</Nothing>
  ) : (
    <ul>
      {live.map(each => (
        <LeaseCard key={each.id} {...props} lease={each} />
      ))}
    </ul>
  );
}
