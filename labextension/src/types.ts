/**
 * Short names for the parts of what the API says.
 */

import type * as Wire from './wire';

export type { Change, Explanation, Lease, Pool, Request } from './wire';

export type Device = Wire.Devices['devices'][number];
export type Part = Device['parts'][number];
export type Reading = NonNullable<Device['reading']>;
export type Verdict = Device['verdict'];
export type Evidence = Wire.Evidence;
export type Grounds = Evidence['evidence'];
export type Incident = NonNullable<Grounds['incidents']>[number];
export type Sample = NonNullable<Grounds['readings']>[number];
export type Node = Wire.Pool['nodes'][number];
export type Slice = Wire.Lease['slices'][number];
export type LeaseState = Wire.Lease['state'];
export type Waiting = Wire.Queue['queue'][number];
export type Notice = Wire.Notices['notices'][number];
export type Hour = Wire.History['hours'][number];
export type UsageRow = Wire.Usage['usage'][number];
export type Project = Wire.ProjectsNow['projects'][number];
export type Defaults = Wire.ProjectsNow['defaults'];
export type HealthAction = Wire.Health['action'];
export type Log = Wire.Logs['logs'][number];
export type Reason = Wire.Explanation['reasons'][number];
