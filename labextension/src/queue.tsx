/**
 * The panel of the queue and of fair shares: who waits and why, and who has how much of what is theirs.
 */

import type { TranslationBundle } from '@jupyterlab/translation';
import React from 'react';

import { clock, duration, gpus } from './format';
import { IViewProps, Loaded, Nothing } from './parts';
import { CommandIDs } from './tokens';
import type { Project, UsageRow, Waiting } from './types';

/** How a project or a user stands, in GPUs; what was used lately in GPU hours. */
export interface IShare {
  held: number;
  quota: number;
  limit: number;
  deserved: number;
  borrowed: number;
  decayed: number;
}

/** The panel. */
export function QueueView(props: IViewProps): JSX.Element {
  const { model, trans } = props;
  return (
    <Loaded {...props} topics={['queue', 'projects', 'usage', 'pool']}>
      {() => (
        <div className="jp-gpupool-Queue">
          <h3>{trans.__('Waiting')}</h3>
          {model.queue.length === 0 && <Nothing>{trans.__('Nobody waits.')}</Nothing>}
          <ol>
            {model.queue.map((each, n) => (
              <Waits key={each.id || n} {...props} row={each} />
            ))}
          </ol>
          <h3>{trans.__('Fair share')}</h3>
          <Shares {...props} />
        </div>
      )}
    </Loaded>
  );
}

function Waits(props: IViewProps & { row: Waiting }): JSX.Element {
  const { row, model, commands, trans } = props;
  const now = model.now();
  const mine = row.user === model.pool?.user.name;
  const since = row.submitted_at ? trans.__('waits for %1', duration(now - row.submitted_at)) : '';
  const start = row.expected_start
    ? trans.__('starts about %1 (in %2)', clock(row.expected_start, now), duration(row.expected_start - now))
    : '';
  return (
    <li className={mine ? 'jp-mod-mine' : ''} value={row.place}>
      <strong>{mine ? trans.__('you') : row.user}</strong>
      {` ${trans._n('%2 GPU', '%2 GPUs', row.gpus, gpus(row.gpus))} ${row.name ? `(${row.name})` : ''}`}
      <p className="jp-gpupool-small">{[since, start].filter(Boolean).join(', ')}</p>
      {row.why && <p className="jp-gpupool-small">{row.why}</p>}
      {row.id && (
        <button
          className="jp-gpupool-Button"
          onClick={() => void commands.execute(CommandIDs.explain, { lease: row.id })}
        >
          {mine ? trans.__('Why am I waiting?') : trans.__('Why?')}
        </button>
      )}
    </li>
  );
}

function Shares(props: IViewProps): JSX.Element {
  const { model, trans } = props;
  const all = model.pool?.gpus ?? 0;
  const children = (parent: string): Project[] => model.projects.filter(each => each.parent === parent);
  const names = new Set(model.projects.map(each => each.name));
  const roots = model.projects.filter(each => !names.has(each.parent));
  const shares = model.projects.map(share);
  const some = (what: (each: IShare) => number): boolean => shares.some(each => what(each) > 0);
  const branch = (project: Project): JSX.Element => (
    <li key={project.name}>
      <Share name={project.name} share={share(project)} all={all} trans={trans} />
      <ul>
        {children(project.name).map(branch)}
        {model.usage
          .filter(each => each.project === project.name && counts(each))
          .map(each => (
            <li key={each.user}>
              <Share name={each.user} share={share(each)} all={all} trans={trans} person />
            </li>
          ))}
      </ul>
    </li>
  );
  return (
    <>
      <ul className="jp-gpupool-Shares">{roots.map(branch)}</ul>
      <p className="jp-gpupool-small jp-gpupool-Legend">
        <span className="jp-gpupool-Legend-held">{trans.__('has now')}</span>
        {some(each => each.borrowed) && (
          <span className="jp-gpupool-Legend-borrowed">{trans.__('borrowed')}</span>
        )}
        {some(each => each.quota) && <span className="jp-gpupool-Legend-quota">{trans.__('quota')}</span>}
        {some(each => each.deserved) && (
          <span className="jp-gpupool-Legend-deserved">{trans.__('deserved')}</span>
        )}
      </p>
    </>
  );
}

/** Who has something, waits for something, has used something lately or is promised something. */
function counts(row: UsageRow): boolean {
  return row.gpus + row.waiting + row.guaranteed > 0 || hours(row) > 0;
}

/** What was used lately in GPU hours, to a tenth. */
function hours(row: Project | UsageRow): number {
  return Math.round(row.decayed / 360) / 10;
}

function share(row: Project | UsageRow): IShare {
  const models = Object.entries(row.limit).filter(([key]) => key !== 'cpus' && key !== 'memory');
  return {
    held: row.gpus,
    quota: row.guaranteed,
    limit: row.limit['*'] ?? models.reduce((all, [, each]) => all + each, 0),
    deserved: row.deserved,
    borrowed: row.borrowed,
    decayed: hours(row)
  };
}

function Share(props: {
  name: string;
  share: IShare;
  all: number;
  trans: TranslationBundle;
  person?: boolean;
}): JSX.Element {
  const { name, all, trans } = props;
  const { held, quota, limit, deserved, borrowed, decayed } = props.share;
  const most = Math.max(all, held, quota, limit, 1);
  const at = (amount: number): string => `${(100 * amount) / most}%`;
  const words = [
    trans.__('has %1', gpus(held)),
    quota ? trans.__('quota %1', gpus(quota)) : trans.__('no quota'),
    limit ? trans.__('limit %1', gpus(limit)) : '',
    trans.__('deserved %1', gpus(deserved)),
    borrowed ? trans.__('borrowed %1', gpus(borrowed)) : '',
    decayed ? trans.__('used lately %1 GPU hours', gpus(decayed)) : ''
  ].filter(Boolean);
  return (
    <div className={`jp-gpupool-Share${props.person ? ' jp-mod-person' : ''}`}>
      <span className="jp-gpupool-Share-name">{name}</span>
      <span className="jp-gpupool-Share-bar" aria-hidden="true">
        <span className="jp-gpupool-Share-held" style={{ width: at(held - borrowed) }} />
        {borrowed ? (
          <span
            className="jp-gpupool-Share-borrowed"
            style={{ left: at(held - borrowed), width: at(borrowed) }}
          />
        ) : null}
        {quota > 0 && <span className="jp-gpupool-Share-quota" style={{ left: at(quota) }} />}
        {deserved > 0 && <span className="jp-gpupool-Share-deserved" style={{ left: at(deserved) }} />}
      </span>
      <span className="jp-gpupool-small">{words.join(', ')}</span>
    </div>
  );
}
