/**
 * What stands in the form's fields, and the request that it becomes.
 *
 * Rule 1: only what was said is sent; the rest is the pool's to choose.
 * Rule 2: nothing is judged here but whether a line can be read at all.
 */

import type { TranslationBundle } from '@jupyterlab/translation';

import type { IFault } from './request';
import type { Device, Request } from './types';

/** What stands in the form's fields, as typed. */
export interface IDraft {
  kind: 'whole' | 'share' | 'mig';
  gpus: string;
  vram: string;
  mig: string;
  time_limit: string;
  project: string;
  name: string;
  model: string;
  node: string;
  min_vram: string;
  exclude: string;
  max_gpus: string;
  min_gpus: string;
  idle_timeout: string;
  priority: string;
  cpus: string;
  memory: string;
  python: string;
  working_directory: string;
  pre_import: string;
  /** Environment variables, and options of dask-cuda: a NAME=VALUE a line. */
  variables: string;
  options: string;
  isolated: boolean;
  same_node: boolean;
  nvlink: boolean;
  spread: boolean;
  same_device: boolean;
  preemptible: boolean;
}

export const EMPTY: IDraft = {
  kind: 'whole',
  gpus: '1',
  vram: '10GB',
  mig: '',
  time_limit: '',
  project: '',
  name: '',
  model: '',
  node: '',
  min_vram: '',
  exclude: '',
  max_gpus: '',
  min_gpus: '',
  idle_timeout: '',
  priority: '',
  cpus: '',
  memory: '',
  python: '',
  working_directory: '',
  pre_import: '',
  variables: '',
  options: '',
  isolated: false,
  same_node: false,
  nvlink: false,
  spread: false,
  same_device: false,
  preemptible: false
};

/** Fields that are sent as typed if anything is typed: of the request, and of its environment. */
const TEXTS = [
  'time_limit',
  'project',
  'name',
  'model',
  'node',
  'min_vram',
  'idle_timeout',
  'priority',
  'cpus',
  'memory'
] as const;
const ENVIRONMENT = ['python', 'working_directory'] as const;
const PAIRS = ['variables', 'options'] as const;
/** Fields that are yes or no. */
export const FLAGS = ['isolated', 'same_node', 'nvlink', 'spread', 'same_device', 'preemptible'] as const;

/** What each kind is asked for by, and what else only it has. */
const OWN: Record<IDraft['kind'], readonly (keyof IDraft)[]> = {
  whole: ['gpus', 'max_gpus', 'min_gpus'],
  share: ['vram', 'isolated', 'same_device'],
  mig: ['mig']
};
const OTHERS = Object.values(OWN).flat();

/** Say whether a field is there for what is asked for. */
function counts(draft: IDraft, name: keyof IDraft): boolean {
  return OWN[draft.kind].includes(name) || !OTHERS.includes(name);
}

/** Turn what stands in the form into a request: only what was said. */
export function asRequest(draft: IDraft): Request {
  const what: Record<string, unknown> = {};
  const say = (name: keyof IDraft, value: unknown): void => {
    if (value && counts(draft, name)) {
      what[name] = value;
    }
  };
  OWN[draft.kind].forEach(name => say(name, draft[name]));
  TEXTS.forEach(name => say(name, draft[name].trim()));
  FLAGS.forEach(name => say(name, draft[name]));
  if (draft.kind !== 'whole' && draft.gpus !== '1') {
    what.gpus = draft.gpus;
  }
  if (!draft.preemptible) {
    what.interactive = true; // a person is at it
  }
  const more = {
    exclude: words(draft.exclude),
    environment: environment(draft),
    options: pairs(draft.options)
  };
  Object.entries(more).forEach(([name, value]) => Object.keys(value).length > 0 && (what[name] = value));
  return what;
}

/** What is said of how the lease's processes start. */
function environment(draft: IDraft): Record<string, unknown> {
  const texts = ENVIRONMENT.map(name => [name, draft[name].trim()] as const);
  const more = [
    ['pre_import', words(draft.pre_import)],
    ['variables', pairs(draft.variables)]
  ] as const;
  return Object.fromEntries([...texts, ...more].filter(([, value]) => Object.keys(value).length > 0));
}

function words(text: string): string[] {
  return text.split(/[\s,]+/).filter(Boolean);
}

function lines(text: string): string[] {
  return text
    .split('\n')
    .map(line => line.trim())
    .filter(Boolean);
}

const PAIR = /^([^=]+?)\s*=\s*(.*)$/;

function pairs(text: string): Record<string, string> {
  const read = lines(text).flatMap(line => [PAIR.exec(line)].filter(found => found !== null));
  return Object.fromEntries(read.map(([, name, value]) => [name!, value!]));
}

/** Say which lines cannot be read, as the pool says what is wrong with a field. */
export function misread(draft: IDraft, trans: TranslationBundle): IFault[] {
  return PAIRS.flatMap(field =>
    lines(draft[field])
      .filter(line => !PAIR.test(line))
      .map(line => ({
        reason: 'bad_request',
        sentence: trans.__('“%1” is not NAME=VALUE.', line),
        advice: trans.__('Write one of them a line.'),
        field
      }))
  );
}

/** Part faults: those that a field is there for, and the others. */
export function placed(
  draft: IDraft,
  faults: readonly IFault[],
  hidden: readonly string[] = []
): [IFault[], IFault[]] {
  const named = faults.map(fault => ({ ...fault, field: fieldOf(fault.field) }));
  const beside = ({ field }: IFault): boolean =>
    field in draft && !hidden.includes(field) && (field === 'gpus' || counts(draft, field as keyof IDraft));
  return [named.filter(beside), named.filter(fault => !beside(fault))];
}

/** The form's field for a field of the request: each option of dask-cuda is a line of one. */
function fieldOf(path: string): string {
  const [group, name] = path.split('.');
  return group === 'environment' ? (name ?? '') : group!;
}

/** The MIG profiles that can be asked for. */
export function profiles(devices: readonly Device[]): string[] {
  return [...new Set(devices.flatMap(each => each.profiles))];
}
