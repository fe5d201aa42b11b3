/**
 * The panel of my history: GPU hours a day, and those of them in which nothing computed.
 *
 * Rule 1: hours are those of the pool's ledger, which knows of leases that are long forgotten too.
 */

import type { TranslationBundle } from '@jupyterlab/translation';
import React from 'react';

import { duration, gpus } from './format';
import { IViewProps, Loaded, Nothing } from './parts';
import type { Hour, Lease } from './types';

/** So many days are shown, today included. */
const DAYS = 14;

/** GPU hours of one day: in all, and those of them in which nothing computed. */
export interface IDay {
  start: number;
  hours: number;
  idle: number;
}

/** Sum the ledger's hours by day, in the browser's time zone; an hour belongs to the day in which it begins. */
export function days(ledger: readonly Hour[], now: number, count = DAYS): IDay[] {
  const found: IDay[] = [];
  for (let back = count - 1; back >= 0; back--) {
    const [start, end] = [midnight(now, back), midnight(now, back - 1)];
    const own = ledger.filter(each => start <= each.time && each.time < end);
    const sum = (what: (each: Hour) => number): number =>
      own.reduce((all, each) => all + what(each), 0) / 3600;
    found.push({ start, hours: sum(each => each.used), idle: sum(each => each.idle) });
  }
  return found;
}

/** The begin of a day so many days ago; days of a change to summer time are not 24 hours long. */
function midnight(now: number, back: number): number {
  const day = new Date(now * 1000);
  day.setHours(0, 0, 0, 0);
  day.setDate(day.getDate() - back);
  return day.getTime() / 1000;
}

type Span = [number, number] | null;

function held(lease: Lease, now: number): Span {
  return lease.granted_at === null ? null : [lease.granted_at, lease.ended_at ?? now];
}

/** The panel. */
export function HistoryView(props: IViewProps): JSX.Element {
  const { model, trans } = props;
  return (
    <Loaded {...props} topics={['leases', 'pool', 'history']}>
      {() => {
        const me = model.pool?.user.name;
        const mine = model.leases.filter(each => each.user === me);
        const all = days(model.history, model.now());
        const total = all.reduce((sum, each) => sum + each.hours, 0);
        const idle = all.reduce((sum, each) => sum + each.idle, 0);
        if (total === 0 && !mine.some(each => each.granted_at !== null)) {
          return <Nothing>{trans.__('You have not had any GPUs yet.')}</Nothing>;
        }
        return (
          <div className="jp-gpupool-History">
            <p>{trans.__('%1 GPU hours in %2 days, %3 of them idle', hours(total), DAYS, hours(idle))}</p>
            <Chart days={all} trans={trans} />
            <Longest leases={mine} now={model.now()} trans={trans} />
          </div>
        );
      }}
    </Loaded>
  );
}

function hours(amount: number): string {
  return amount >= 10 ? amount.toFixed(0) : gpus(amount);
}

/** Bars a day as SVG; the same as a table for who cannot see them. */
function Chart(props: { days: IDay[]; trans: TranslationBundle }): JSX.Element {
  const { trans } = props;
  const most = Math.max(...props.days.map(each => each.hours), 0.01);
  const [width, height, foot] = [280, 96, 14];
  const step = width / props.days.length;
  const label = (day: IDay): string =>
    new Date(day.start * 1000).toLocaleDateString(undefined, { month: 'short', day: 'numeric' });
  return (
    <figure className="jp-gpupool-Chart">
      <svg viewBox={`0 0 ${width} ${height + foot}`} aria-hidden="true">
        <text x={0} y={9}>{`${hours(most)} h`}</text>
        <line x1={0} x2={width} y1={height} y2={height} />
        {props.days.map((each, n) => {
          const [tall, idle] = [each.hours, each.idle].map(amount => ((height - 14) * amount) / most) as [
            number,
            number
          ];
          return (
            <g key={each.start}>
              <title>
                {trans.__('%1: %2 h, %3 h idle', label(each), hours(each.hours), hours(each.idle))}
              </title>
              <rect
                className="jp-gpupool-Chart-used"
                x={n * step + 2}
                y={height - tall}
                width={step - 4}
                height={tall}
              />
              <rect
                className="jp-gpupool-Chart-idle"
                x={n * step + 2}
                y={height - tall}
                width={step - 4}
                height={idle}
              />
              {(props.days.length - 1 - n) % 4 === 0 && (
                <text x={Math.min(width - 16, n * step + step / 2)} y={height + 11} textAnchor="middle">
                  {label(each)}
                </text>
              )}
            </g>
          );
        })}
      </svg>
      <table className="jp-gpupool-hidden">
        <caption>{trans.__('GPU hours by day')}</caption>
        <thead>
          <tr>
            <th>{trans.__('Day')}</th>
            <th>{trans.__('GPU hours')}</th>
            <th>{trans.__('idle')}</th>
          </tr>
        </thead>
        <tbody>
          {props.days.map(each => (
            <tr key={each.start}>
              <td>{label(each)}</td>
              <td>{hours(each.hours)}</td>
              <td>{hours(each.idle)}</td>
            </tr>
          ))}
        </tbody>
      </table>
      <figcaption className="jp-gpupool-small jp-gpupool-Legend">
        <span className="jp-gpupool-Legend-held">{trans.__('used')}</span>
        <span className="jp-gpupool-Legend-idle">{trans.__('of it idle')}</span>
      </figcaption>
    </figure>
  );
}

/** The leases that have cost most. */
function Longest(props: { leases: readonly Lease[]; now: number; trans: TranslationBundle }): JSX.Element {
  const cost = (each: Lease): number => {
    const span = held(each, props.now);
    return span ? each.gpus * (span[1] - span[0]) : 0;
  };
  const most = [...props.leases].sort((one, other) => cost(other) - cost(one)).slice(0, 5);
  return (
    <>
      <h3>{props.trans.__('What took most')}</h3>
      <ul>
        {most.filter(cost).map(each => (
          <li key={each.id}>
            <strong>{each.name}</strong> {props.trans._n('%2 GPU', '%2 GPUs', each.gpus, gpus(each.gpus))},{' '}
            {duration(cost(each) / (each.gpus || 1))}
          </li>
        ))}
      </ul>
    </>
  );
}
