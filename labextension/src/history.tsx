/**
 * The panel of my history: GPU hours a day, and what of my leases is idle now.
 */

import type { TranslationBundle } from '@jupyterlab/translation';
import React from 'react';

import { duration, gpus } from './format';
import { IViewProps, Loaded, Nothing } from './parts';
import type { Lease } from './types';

const DAY_S = 86_400;
/** So many days are shown, today included. */
const DAYS = 14;

/** GPU hours of one day: in all, and those of them in which nothing computed. */
export interface IDay {
  start: number;
  hours: number;
  idle: number;
}

/** Sum the GPU hours of leases by day, in the browser's time zone. */
export function days(leases: readonly Lease[], now: number, count = DAYS): IDay[] {
  const midnight = new Date(now * 1000);
  midnight.setHours(0, 0, 0, 0);
  const found: IDay[] = [];
  for (let back = count - 1; back >= 0; back--) {
    const day = new Date(midnight);
    day.setDate(day.getDate() - back);
    const start = day.getTime() / 1000;
    const end = Math.min(now, start + DAY_S);
    const [hours, idle] = [held, idled].map(span =>
      leases.reduce((sum, each) => sum + each.gpus * within(span(each, now), start, end), 0)
    );
    found.push({ start, hours: hours! / 3600, idle: idle! / 3600 });
  }
  return found;
}

type Span = [number, number] | null;

function held(lease: Lease, now: number): Span {
  return lease.granted_at === null ? null : [lease.granted_at, lease.ended_at ?? now];
}

function idled(lease: Lease, now: number): Span {
  return lease.idle_since === null ? null : [lease.idle_since, lease.ended_at ?? now];
}

/** The seconds of a span that are within a day. */
function within(span: Span, start: number, end: number): number {
  return span ? Math.max(0, Math.min(span[1], end) - Math.max(span[0], start)) : 0;
}

/** The panel. */
export function HistoryView(props: IViewProps): JSX.Element {
  const { model, trans } = props;
  return (
    <Loaded {...props} topics={['leases', 'pool']}>
      {() => {
        const me = model.pool?.user.name;
        const mine = model.leases.filter(each => each.user === me);
        const all = days(mine, model.now());
        const total = all.reduce((sum, each) => sum + each.hours, 0);
        const idle = all.reduce((sum, each) => sum + each.idle, 0);
        if (!mine.some(each => each.granted_at !== null)) {
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
              <title>{`${label(each)}: ${hours(each.hours)} h`}</title>
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
        <span className="jp-gpupool-Legend-borrowed">{trans.__('idle now')}</span>
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
