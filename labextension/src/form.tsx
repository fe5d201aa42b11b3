/**
 * The Request panel: a form that follows what the pool offers, and says what would come of it before it is sent.
 *
 * Rule 1: nothing is judged here; the pool's own dry run says yes, when, or no.
 * Rule 2: a no stands beside the field that caused it.
 */

import type { TranslationBundle } from '@jupyterlab/translation';
import { UUID } from '@lumino/coreutils';
import React from 'react';

import { clock, duration } from './format';
import { Fault, IViewProps, Loaded } from './parts';
import { IFault, Problem } from './request';
import { forbidden } from './rights';
import type { IPoolModel } from './tokens';
import type { Device, Explanation, Request } from './types';

/** Milliseconds of rest after the last keystroke before the pool is asked. */
const REST_MS = 350;

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
  idle_timeout: string;
  priority: string;
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
  idle_timeout: '',
  priority: '',
  same_node: false,
  nvlink: false,
  spread: false,
  same_device: false,
  preemptible: false
};

/** Fields that are sent as typed if anything is typed. */
const TEXTS = ['time_limit', 'project', 'name', 'model', 'node', 'min_vram', 'idle_timeout'] as const;
const FLAGS = ['same_node', 'nvlink', 'spread', 'same_device', 'preemptible'] as const;

/** Turn what stands in the form into a request: only what was said. */
export function asRequest(draft: IDraft): Request {
  const what: Request = {};
  if (draft.kind === 'whole') {
    what.gpus = draft.gpus;
    if (draft.max_gpus) {
      what.max_gpus = draft.max_gpus;
    }
  } else if (draft.kind === 'share') {
    what.vram = draft.vram;
  } else {
    what.mig = draft.mig;
  }
  if (draft.kind !== 'whole' && draft.gpus !== '1') {
    what.gpus = draft.gpus;
  }
  const exclude = draft.exclude.split(/[\s,]+/).filter(Boolean);
  if (exclude.length > 0) {
    what.exclude = exclude;
  }
  TEXTS.filter(name => draft[name].trim()).forEach(name => (what[name] = draft[name].trim()));
  FLAGS.filter(name => draft[name]).forEach(name => (what[name] = true));
  if (!draft.preemptible) {
    what.interactive = true; // a person is at it
  }
  if (draft.priority) {
    what.priority = draft.priority;
  }
  return what;
}

/** The MIG profiles that can be asked for. */
export function profiles(devices: readonly Device[]): string[] {
  return [...new Set(devices.flatMap(each => each.profiles))];
}

/** The panel. */
export function RequestView(props: IViewProps & { sent: () => void }): JSX.Element {
  return (
    <Loaded {...props} topics={['pool', 'projects']}>
      {() => <Form {...props} />}
    </Loaded>
  );
}

/** What the pool has last said to the draft. */
interface IAnswer {
  trial: Explanation | null;
  faults: readonly IFault[];
}

/** Ask the pool what would come of the draft; not where asking is refused too. */
function useTrial(
  model: IPoolModel,
  draft: IDraft,
  off: boolean
): [IAnswer | null, (faults: readonly IFault[]) => void] {
  const [answer, setAnswer] = React.useState<IAnswer | null>(null);
  const key = JSON.stringify(asRequest(draft));
  // What others do changes the answer too.
  const version = `${model.pool?.gpus_free} ${model.pool?.pending} ${model.pool?.leases}`;
  React.useEffect(() => {
    if (off) {
      return undefined;
    }
    let current = true;
    const timer = setTimeout(async () => {
      const said = await model.trial(JSON.parse(key) as Request).then(
        (trial): IAnswer => ({ trial, faults: [] }),
        (error): IAnswer => ({ trial: null, faults: Problem.of(error).faults })
      );
      if (current) {
        setAnswer(said);
      }
    }, REST_MS);
    return () => {
      current = false;
      clearTimeout(timer);
    };
  }, [model, key, version, off]);
  return [answer, faults => setAnswer({ trial: null, faults })];
}

function Form(props: IViewProps & { sent: () => void }): JSX.Element {
  const { model, trans } = props;
  const [draft, setDraft] = React.useState<IDraft>(EMPTY);
  const [busy, setBusy] = React.useState(false);
  const off = forbidden(model, 'write', trans);
  const [answer, refuse] = useTrial(model, draft, off !== '');
  const key = React.useRef(UUID.uuid4());
  const set = (change: Partial<IDraft>): void => {
    key.current = UUID.uuid4();
    setDraft({ ...draft, ...change });
  };
  const send = async (event: React.FormEvent): Promise<void> => {
    event.preventDefault();
    setBusy(true);
    try {
      await model.request(asRequest(draft), key.current);
      set({ name: '' });
      props.sent();
    } catch (error) {
      refuse(Problem.of(error).faults);
    } finally {
      setBusy(false);
    }
  };
  const faults = answer?.faults ?? [];
  const shown = new Set(fieldsOf(draft.kind));
  const elsewhere = faults.filter(fault => !shown.has(fault.field));
  const field = { draft, set, faults, trans };
  const projects = model.projects.map(each => each.name);
  const models = Object.keys(model.pool?.models ?? {});
  const nodes = (model.pool?.nodes ?? []).map(each => each.name);
  const known = profiles(model.devices);
  return (
    <form className="jp-gpupool-Form" onSubmit={event => void send(event)} noValidate>
      <Kinds {...field} mig={known.length > 0 || model.devices.some(each => each.mig)} />
      {draft.kind === 'whole' && <Text {...field} name="gpus" label={trans.__('GPUs')} type="number" first />}
      {draft.kind === 'share' && (
        <>
          <Text {...field} name="vram" label={trans.__('GPU memory')} hint={trans.__('for example 20GB')} />
          <p className="jp-gpupool-small">
            {trans.__(
              'Others may share the GPU. The limit holds by software; where MPS runs, only your own shares use it together, and a crash of one ends them all.'
            )}
          </p>
        </>
      )}
      {draft.kind === 'mig' && (
        <Text {...field} name="mig" label={trans.__('MIG profile')} list={known} hint="1g.10gb" />
      )}
      <Text
        {...field}
        name="time_limit"
        label={trans.__('Time')}
        list={['30m', '1h', '2h', '8h', '1d']}
        hint={usual(model, draft, trans)}
      />
      {projects.length > 1 && (
        <Choice
          {...field}
          name="project"
          label={trans.__('Project')}
          values={projects}
          none={trans.__('the usual one')}
        />
      )}
      <details className="jp-gpupool-Form-more">
        <summary>{trans.__('Options')}</summary>
        <Text {...field} name="name" label={trans.__('Name')} hint={trans.__('chosen for you')} />
        {models.length > 1 && <Choice {...field} name="model" label={trans.__('Model')} values={models} />}
        {nodes.length > 1 && <Choice {...field} name="node" label={trans.__('Node')} values={nodes} />}
        {draft.kind !== 'whole' && <Text {...field} name="gpus" label={trans.__('How many')} type="number" />}
        <Text
          {...field}
          name="min_vram"
          label={trans.__('Memory of each GPU at least')}
          hint={trans.__('any')}
        />
        <Text
          {...field}
          name="exclude"
          label={trans.__('Not on')}
          hint={trans.__('nodes or UUIDs of GPUs')}
        />
        {draft.kind === 'whole' && (
          <Text
            {...field}
            name="max_gpus"
            label={trans.__('Grow up to')}
            type="number"
            hint={trans.__('no growth')}
          />
        )}
        <Text
          {...field}
          name="idle_timeout"
          label={trans.__('Ends when idle for')}
          hint={trans.__('as the pool says')}
        />
        <Text {...field} name="priority" label={trans.__('Priority among mine')} type="number" hint="0" />
        <Check {...field} name="same_node" label={trans.__('All on one node')} />
        <Check {...field} name="nvlink" label={trans.__('All linked by NVLink')} />
        <Check {...field} name="spread" label={trans.__('Rather on many nodes than on few')} />
        {draft.kind === 'share' && (
          <Check {...field} name="same_device" label={trans.__('Several shares may sit on one GPU')} />
        )}
        <Check {...field} name="preemptible" label={trans.__('May be suspended when others need its GPUs')} />
      </details>
      {elsewhere.length > 0 && <Fault problem={new Problem(0, elsewhere)} trans={trans} />}
      {off ? (
        <p className="jp-gpupool-Outlook jp-mod-bad">{`✕ ${off}`}</p>
      ) : (
        <Outlook answer={answer} now={model.now()} trans={trans} />
      )}
      <button
        className="jp-gpupool-Button jp-mod-main"
        type="submit"
        disabled={busy || off !== '' || faults.length > 0}
        title={off || undefined}
      >
        {busy ? trans.__('Asking…') : label(draft, trans)}
      </button>
    </form>
  );
}

function fieldsOf(kind: IDraft['kind']): string[] {
  const size = { whole: ['max_gpus'], share: ['vram'], mig: ['mig'] }[kind];
  return ['gpus', ...size, ...TEXTS, ...FLAGS, 'exclude', 'priority'];
}

function label(draft: IDraft, trans: TranslationBundle): string {
  const count = Number(draft.gpus);
  if (draft.kind === 'whole' && count > 0) {
    return trans._n('Request %2 GPU', 'Request %2 GPUs', count, draft.gpus);
  }
  return draft.kind === 'mig' ? trans.__('Request an instance') : trans.__('Request a share');
}

/** The time that a lease gets where none is said. */
function usual(model: IPoolModel, draft: IDraft, trans: TranslationBundle): string {
  const own = model.projects.find(each => each.name === draft.project) ?? model.projects[0];
  return own?.default_time ? trans.__('usually %1', duration(own.default_time)) : '2h';
}

/** Say whether it would start now, and otherwise where it would stand and when it would start. */
function Outlook(props: { answer: IAnswer | null; now: number; trans: TranslationBundle }): JSX.Element {
  const { answer, now, trans } = props;
  let text = trans.__('Asking the pool…');
  let why: string[] = [];
  let mood = '';
  if (answer?.trial?.starts_now) {
    text = `✓ ${trans.__('Starts now.')}`;
    mood = 'jp-mod-good';
  } else if (answer?.trial) {
    const { place, expected_start, reasons } = answer.trial;
    const when = expected_start
      ? trans.__('starts about %1 (in %2)', clock(expected_start, now), duration(expected_start - now))
      : trans.__('no telling when it starts');
    text = `◷ ${place ? trans.__('Place %1 in the queue, %2.', place, when) : trans.__('Would wait, %1.', when)}`;
    why = reasons.map(each => `${each.sentence} ${each.advice}`);
    mood = 'jp-mod-warn';
  } else if (answer) {
    text = `✕ ${trans.__('Not like this.')}`;
    mood = 'jp-mod-bad';
  }
  return (
    <div className={`jp-gpupool-Outlook ${mood}`} role="status" aria-live="polite">
      <p>{text}</p>
      {why.map((each, n) => (
        <p key={n} className="jp-gpupool-small">
          {each}
        </p>
      ))}
    </div>
  );
}

interface IFieldProps {
  draft: IDraft;
  set: (change: Partial<IDraft>) => void;
  faults: readonly IFault[];
  trans: TranslationBundle;
}

type TextName = Exclude<keyof IDraft, 'kind' | (typeof FLAGS)[number]>;

/** A field's label, and what is wrong with it. */
function Labelled(props: {
  name: string;
  label: string;
  faults: readonly IFault[];
  children: (id: string, wrong: boolean) => JSX.Element;
}): JSX.Element {
  const id = `jp-gpupool-field-${props.name}`;
  const own = props.faults.filter(fault => fault.field === props.name);
  return (
    <div className="jp-gpupool-Field">
      <label htmlFor={id}>{props.label}</label>
      {props.children(id, own.length > 0)}
      {own.length > 0 && (
        <p id={`${id}-fault`} className="jp-gpupool-Field-fault">
          {own.map(fault => `✕ ${fault.sentence} ${fault.advice}`).join(' ')}
        </p>
      )}
    </div>
  );
}

function Text(
  props: IFieldProps & {
    name: TextName;
    label: string;
    hint?: string;
    type?: string;
    list?: string[];
    first?: boolean;
  }
): JSX.Element {
  const { name, draft, set, list } = props;
  return (
    <Labelled {...props}>
      {(id, wrong) => (
        <>
          <input
            id={id}
            className="jp-mod-styled"
            type={props.type ?? 'text'}
            min={props.type === 'number' && name !== 'priority' ? 1 : undefined}
            value={draft[name]}
            placeholder={props.hint}
            list={list?.length ? `${id}-list` : undefined}
            aria-invalid={wrong}
            aria-describedby={wrong ? `${id}-fault` : undefined}
            onChange={event => set({ [name]: event.target.value })}
          />
          {list && list.length > 0 && (
            <datalist id={`${id}-list`}>
              {list.map(each => (
                <option key={each} value={each} />
              ))}
            </datalist>
          )}
        </>
      )}
    </Labelled>
  );
}

function Choice(
  props: IFieldProps & { name: TextName; label: string; values: string[]; none?: string }
): JSX.Element {
  const { name, draft, set, values, trans } = props;
  return (
    <Labelled {...props}>
      {(id, wrong) => (
        <select
          id={id}
          className="jp-mod-styled"
          value={draft[name]}
          aria-invalid={wrong}
          aria-describedby={wrong ? `${id}-fault` : undefined}
          onChange={event => set({ [name]: event.target.value })}
        >
          <option value="">{props.none ?? trans.__('any')}</option>
          {values.map(each => (
            <option key={each}>{each}</option>
          ))}
        </select>
      )}
    </Labelled>
  );
}

function Check(props: IFieldProps & { name: (typeof FLAGS)[number]; label: string }): JSX.Element {
  const { name, draft, set, faults } = props;
  const own = faults.filter(fault => fault.field === name);
  return (
    <div className="jp-gpupool-Check">
      <label>
        <input
          type="checkbox"
          checked={draft[name]}
          onChange={event => set({ [name]: event.target.checked })}
        />
        {props.label}
      </label>
      {own.map((fault, n) => (
        <p key={n} className="jp-gpupool-Field-fault">{`✕ ${fault.sentence} ${fault.advice}`}</p>
      ))}
    </div>
  );
}

function Kinds(props: IFieldProps & { mig: boolean }): JSX.Element {
  const { draft, set, trans } = props;
  const kinds: [IDraft['kind'], string][] = [
    ['whole', trans.__('Whole GPUs')],
    ['share', trans.__('Share of one')]
  ];
  if (props.mig) {
    kinds.push(['mig', trans.__('MIG instance')]);
  }
  return (
    <fieldset className="jp-gpupool-Kinds">
      <legend>{trans.__('What')}</legend>
      {kinds.map(([kind, words]) => (
        <label key={kind} className={draft.kind === kind ? 'jp-mod-chosen' : ''}>
          <input
            type="radio"
            name="jp-gpupool-kind"
            checked={draft.kind === kind}
            onChange={() => set({ kind, gpus: '1' })}
          />
          {words}
        </label>
      ))}
    </fieldset>
  );
}
