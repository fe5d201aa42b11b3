/**
 * Small pieces that all views are made of.
 */

import type { TranslationBundle } from '@jupyterlab/translation';
import type { CommandRegistry } from '@lumino/commands';
import React from 'react';

import { Problem } from './request';
import type { IPoolModel, Topic } from './tokens';
import type { Verdict } from './types';

/** What every view gets. */
export interface IViewProps {
  model: IPoolModel;
  commands: CommandRegistry;
  trans: TranslationBundle;
}

/** A bar that fills from the left, for amounts that have a most. */
export function Meter(props: { label: string; value: number; most: number; text: string }): JSX.Element {
  const part = props.most > 0 ? Math.min(1, Math.max(0, props.value / props.most)) : 0;
  return (
    <span className="jp-gpupool-Meter" title={`${props.label}: ${props.text}`}>
      <span className="jp-gpupool-Meter-label">{props.label}</span>
      <span className="jp-gpupool-Meter-track" aria-hidden="true">
        <span className="jp-gpupool-Meter-fill" style={{ width: `${part * 100}%` }} />
      </span>
      <span className="jp-gpupool-Meter-text">{props.text}</span>
    </span>
  );
}

/** The id of the words that say why buttons are off. */
export const READ_ONLY_ID = 'jp-gpupool-read-only';

/** A button; one that would be refused is off, and says why. */
export function Button(props: {
  label: string;
  press: () => void;
  /** Why it would be refused; empty: it would not. */
  off?: string;
  main?: boolean;
}): JSX.Element {
  const { label, press, off, main } = props;
  return (
    <button
      className={`jp-gpupool-Button${main ? ' jp-mod-main' : ''}`}
      disabled={Boolean(off)}
      title={off || undefined}
      aria-describedby={off ? READ_ONLY_ID : undefined}
      onClick={press}
    >
      {label}
    </button>
  );
}

/** How far something is that ends by itself. */
export function Progress(props: { label: string; done: number; of: number }): JSX.Element {
  return (
    <div
      className="jp-gpupool-Progress"
      role="progressbar"
      aria-label={props.label}
      aria-valuemin={0}
      aria-valuemax={props.of}
      aria-valuenow={props.done}
    >
      <div
        className="jp-gpupool-Progress-fill"
        style={{ width: `${(100 * props.done) / Math.max(1, props.of)}%` }}
      />
    </div>
  );
}

/** A problem: its sentence, and what to do. */
export function Fault(props: {
  problem: Problem;
  again?: () => void;
  trans: TranslationBundle;
}): JSX.Element {
  const { problem, again, trans } = props;
  return (
    <div className="jp-gpupool-Fault" role="alert">
      {problem.faults.map((fault, n) => (
        <p key={n}>
          {fault.sentence} {fault.advice}
        </p>
      ))}
      {again && (
        <button className="jp-gpupool-Button" onClick={again}>
          {trans.__('Try again')}
        </button>
      )}
    </div>
  );
}

/** What stands where there is nothing to show. */
export function Nothing(props: { children: React.ReactNode }): JSX.Element {
  return <p className="jp-gpupool-Nothing">{props.children}</p>;
}

/** Say why there is no pool to be seen, and offer what can be done. */
function OutOfReach(props: IViewProps): JSX.Element {
  const { model, trans } = props;
  const stand = model.stand;
  if (stand?.state === 'starting' || stand?.state === 'looking') {
    const what =
      stand.state === 'starting'
        ? trans.__('A pool starts on this machine…')
        : trans.__('Looking for the pool…');
    return <Nothing>{what}</Nothing>;
  }
  return (
    <>
      {model.problem && <Fault problem={model.problem} trans={trans} />}
      <div className="jp-gpupool-Actions">
        {stand?.can_start && (
          <Button
            label={trans.__('Start a pool here')}
            press={() => void model.reach(true).catch(() => undefined)}
            off={stand.may.execute ? '' : trans.__('This Jupyter server does not let you start a pool.')}
            main
          />
        )}
        <Button label={trans.__('Try again')} press={() => void again(model)} />
      </div>
    </>
  );
}

/** Have the server look for the pool; where that fails the state says why. */
async function again(model: IPoolModel): Promise<void> {
  await model.reach(false).catch(() => undefined);
  await model.refresh();
}

/** Draw error, then loading, then data, in this order. */
export function Loaded(props: IViewProps & { topics: Topic[]; children: () => JSX.Element }): JSX.Element {
  const { model, trans, topics, children } = props;
  const known = topics.every(topic => model.known(topic));
  if (model.problem && (!known || !model.pool)) {
    return <OutOfReach {...props} />;
  }
  if (!known) {
    return <Nothing>{trans.__('Reading the pool…')}</Nothing>;
  }
  return (
    <>
      {model.problem && <Fault problem={model.problem} trans={trans} />}
      {children()}
    </>
  );
}

/** How a verdict is shown: a sign, a word, and how bad it is. */
export function verdicts(
  trans: TranslationBundle
): Record<Verdict, { sign: string; word: string; mood: string }> {
  return {
    fine: { sign: '✓', word: trans.__('fine'), mood: 'good' },
    watch: { sign: '◔', word: trans.__('watched'), mood: 'warn' },
    restart_worker: { sign: '↻', word: trans.__('worker restarts'), mood: 'warn' },
    retire_soon: { sign: '▲', word: trans.__('to be retired'), mood: 'warn' },
    evacuate: { sign: '✕', word: trans.__('failing'), mood: 'bad' },
    gone: { sign: '✕', word: trans.__('gone'), mood: 'bad' }
  };
}
