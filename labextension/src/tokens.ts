/**
 * What other extensions may use: the model by its token, and the commands by their names.
 */

import type { VDomRenderer } from '@jupyterlab/ui-components';
import { Token } from '@lumino/coreutils';
import type { IDisposable } from '@lumino/disposable';
import type { ISignal } from '@lumino/signaling';

import type { Problem } from './request';
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
  Project,
  Request,
  UsageRow,
  Waiting
} from './types';

/** What a view can ask to be kept up to date; nothing is read that nobody watches. */
export type Topic = 'pool' | 'devices' | 'leases' | 'everyone' | 'queue' | 'projects' | 'usage' | 'history';

/** How the Jupyter server stands with its pool. */
export interface IStand {
  state: 'looking' | 'starting' | 'connected' | 'lost';
  /** Why it is lost: a name, a sentence, and what to do. */
  reason: string;
  sentence: string;
  advice: string;
  /** Whether a pool could be started on this machine. */
  can_start: boolean;
  pool: Pool | null;
  /** What the Jupyter server lets this person do. */
  may: { read: boolean; write: boolean; execute: boolean };
}

/** The pool as this person sees it, and what they can do with it. */
export interface IPoolModel extends VDomRenderer.IModel {
  /** The pool as it stands; null until it has been read. */
  readonly pool: Pool | null;
  /** How the server stands with it; null until it has been asked. */
  readonly stand: IStand | null;
  /** Devices by node and index. A device's object is a new one if and only if something of it has changed. */
  readonly devices: readonly Device[];
  /** My leases and those shared with me, newest first. */
  readonly leases: readonly Lease[];
  /** Everybody's leases, for administrators. */
  readonly everyone: readonly Lease[];
  readonly queue: readonly Waiting[];
  readonly projects: readonly Project[];
  /** What applies where neither a request nor its project says otherwise; null until it has been read. */
  readonly defaults: Defaults | null;
  readonly usage: readonly UsageRow[];
  /** What I used in each hour of the last two weeks; hours in which I used nothing are left out. */
  readonly history: readonly Hour[];
  /** Why the pool cannot be read; null: it can. */
  readonly problem: Problem | null;
  /** Whether a topic has been read at least once. */
  known(topic: Topic): boolean;
  /** The pool's clock in seconds since the epoch. */
  now(): number;
  /** Notices as they come, each once. */
  readonly noticed: ISignal<IPoolModel, Notice>;
  /** Keep topics up to date until the answer is disposed of. */
  watch(...topics: Topic[]): IDisposable;
  /** Read again whatever is watched. */
  refresh(): Promise<void>;
  /** Say what would come of a request. */
  trial(what: Request): Promise<Explanation>;
  /** Ask for a lease. The same key never makes two. */
  request(what: Request, key: string): Promise<Lease>;
  release(lease: string): Promise<void>;
  /** Change one thing of a lease; with `restart`, who is not named any more loses their keys. */
  change(lease: string, what: Change, restart?: boolean): Promise<Lease>;
  explain(lease: string): Promise<Explanation>;
  logs(lease: string): Promise<Log[]>;
  /** What a device's verdict rests on. */
  evidence(device: string): Promise<Evidence>;
  health(target: string, action: HealthAction, why: string): Promise<void>;
  /** Look for the pool now, or start one on the server's machine. */
  reach(start: boolean): Promise<void>;
  /** Where a lease's Dask dashboard is. */
  dashboard(lease: string): string;
}

export const IPoolModel = new Token<IPoolModel>(
  'jupyter-gpupool:IPoolModel',
  'The pool of GPUs: what is known of it, and what can be asked of it.'
);

/** The names of the commands. */
export namespace CommandIDs {
  export const open = 'jupyter-gpupool:open-pool';
  export const request = 'jupyter-gpupool:request-gpus';
  export const refresh = 'jupyter-gpupool:refresh-pool';
  export const use = 'jupyter-gpupool:use-lease';
  export const dashboard = 'jupyter-gpupool:open-dashboard';
  export const extend = 'jupyter-gpupool:extend-lease';
  export const keep = 'jupyter-gpupool:keep-lease';
  export const release = 'jupyter-gpupool:release-lease';
  export const logs = 'jupyter-gpupool:show-logs';
  export const share = 'jupyter-gpupool:share-lease';
  export const explain = 'jupyter-gpupool:explain-lease';
  export const health = 'jupyter-gpupool:set-health';
}
