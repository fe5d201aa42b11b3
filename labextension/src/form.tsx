/**
 * The Request panel: a form that follows what the pool offers, and says what would come of it before it is sent.
 *
 * Rule 1: nothing is judged here; the pool's own dry run says yes, when, or no.
 * Rule 2: a no stands beside the field that caused it.
 */

import type { TranslationBundle } from '@jupyterlab/translation';
import { UUID } from '@lumino/coreutils';
import React from 'react';

import { asRequest, EMPTY, FLAGS, IDraft, misread, placed, profiles } from './draft';
import { Check, Choice, Fold, IFieldProps, Kinds, Lines, Text } from './fields';
import { clock, duration } from './format';
import { Fault, IViewProps, Loaded } from './parts';
import { IFault, Problem } from './request';
import { forbidden } from './rights';
import type { IPoolModel } from './tokens';
import type { Explanation, Request } from './types';

/** Milliseconds of rest after the last keystroke before the pool is asked. */
const REST_MS = 350;

/** The panel. */
export function RequestView(props: IViewProps & { sent: () => void }): JSX.Element {
  return (
    <Loaded {...props} topics={['pool', 'projects']}>
      {() => <Form {...props} />}
    </Loaded>
  );
}

/** The fields that are folded away. */
const OPTIONS = [
  'name',
  'model',
  'node',
  'max_gpus',
  'min_gpus',
  'min_vram',
  'exclude',
  'idle_timeout',
  'priority',
  ...FLAGS
];
const WORKERS = ['cpus', 'memory', 'python', 'working_directory', 'pre_import', 'variables', 'options'];

/** What there is to choose from. */
interface IOffer {
  project: string[];
  model: string[];
  node: string[];
  /** MIG profiles, and whether there are devices that can be cut into instances at all. */
  mig: string[];
  cut: boolean;
}

function offered(model: IPoolModel): IOffer {
  const mig = profiles(model.devices);
  return {
    project: model.projects.map(each => each.name),
    model: Object.keys(model.pool?.models ?? {}),
    node: (model.pool?.nodes ?? []).map(each => each.name),
    mig,
    cut: mig.length > 0 || model.devices.some(each => each.mig)
  };
}

/** What the pool has last said to the draft. */
interface IAnswer {
  trial: Explanation | null;
  faults: readonly IFault[];
}

async function ask(model: IPoolModel, what: Request): Promise<IAnswer> {
  return model.trial(what).then(
    trial => ({ trial, faults: [] }),
    error => ({ trial: null, faults: Problem.of(error).faults })
  );
}

/** Ask the pool what would come of the draft; not where asking is refused too. */
function useTrial(
  model: IPoolModel,
  draft: IDraft,
  off: boolean,
  trans: TranslationBundle
): [IAnswer | null, (faults: readonly IFault[]) => void] {
  const [answer, setAnswer] = React.useState<IAnswer | null>(null);
  const key = JSON.stringify([asRequest(draft), misread(draft, trans)]);
  // What others do changes the answer too.
  const version = `${model.pool?.gpus_free} ${model.pool?.pending} ${model.pool?.leases}`;
  React.useEffect(() => {
    if (off) {
      return undefined;
    }
    let current = true;
    const timer = setTimeout(async () => {
      const [what, wrong] = JSON.parse(key) as [Request, IFault[]];
      const said = wrong.length > 0 ? { trial: null, faults: wrong } : await ask(model, what);
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
  const [answer, refuse] = useTrial(model, draft, off !== '', trans);
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
  const offer = offered(model);
  const hidden = (['project', 'model', 'node'] as const).filter(name => offer[name].length < 2);
  const [faults, elsewhere] = placed(draft, answer?.faults ?? [], hidden);
  const field = { draft, set, faults, trans };
  return (
    <form className="jp-gpupool-Form" onSubmit={event => void send(event)} noValidate>
      <Kinds {...field} mig={offer.cut} />
      {draft.kind === 'whole' && <Text {...field} name="gpus" label={trans.__('GPUs')} type="number" />}
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
        <Text {...field} name="mig" label={trans.__('MIG profile')} list={offer.mig} hint="1g.10gb" />
      )}
      <Text
        {...field}
        name="time_limit"
        label={trans.__('Time')}
        list={['30m', '1h', '2h', '8h', '1d']}
        hint={usual(model, draft, trans)}
      />
      {offer.project.length > 1 && (
        <Choice
          {...field}
          name="project"
          label={trans.__('Project')}
          values={offer.project}
          none={trans.__('the usual one')}
        />
      )}
      <Options {...field} offer={offer} />
      <Workers {...field} />
      {elsewhere.length > 0 && <Fault problem={new Problem(0, elsewhere)} trans={trans} />}
      {off ? (
        <p className="jp-gpupool-Outlook jp-mod-bad">{`✕ ${off}`}</p>
      ) : (
        <Outlook answer={answer} now={model.now()} trans={trans} />
      )}
      <button
        className="jp-gpupool-Button jp-mod-main"
        type="submit"
        disabled={busy || off !== '' || (answer?.faults.length ?? 0) > 0}
        title={off || undefined}
      >
        {busy ? trans.__('Asking…') : label(draft, trans)}
      </button>
    </form>
  );
}

/** Which GPUs, how many at most and at least, and when they may go. */
function Options(props: IFieldProps & { offer: IOffer }): JSX.Element {
  const { offer, ...field } = props;
  const { draft, trans } = field;
  return (
    <Fold {...field} label={trans.__('Options')} names={OPTIONS}>
      <Text {...field} name="name" label={trans.__('Name')} hint={trans.__('chosen for you')} />
      {offer.model.length > 1 && (
        <Choice {...field} name="model" label={trans.__('Model')} values={offer.model} />
      )}
      {offer.node.length > 1 && (
        <Choice {...field} name="node" label={trans.__('Node')} values={offer.node} />
      )}
      {draft.kind === 'whole' ? (
        <Elastic {...field} />
      ) : (
        <Text {...field} name="gpus" label={trans.__('How many')} type="number" />
      )}
      <Text
        {...field}
        name="min_vram"
        label={trans.__('Memory of each GPU at least')}
        hint={trans.__('any')}
      />
      <Text {...field} name="exclude" label={trans.__('Not on')} hint={trans.__('nodes, GPUs')} />
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
      {draft.kind === 'share' && offer.cut && (
        <Check {...field} name="isolated" label={trans.__('Isolated: a MIG instance of that memory')} />
      )}
      <Check {...field} name="preemptible" label={trans.__('May be suspended when others need its GPUs')} />
    </Fold>
  );
}

/** How far a lease of whole GPUs may grow and shrink. */
function Elastic(field: IFieldProps): JSX.Element {
  const { trans } = field;
  return (
    <>
      <Text
        {...field}
        name="max_gpus"
        label={trans.__('Grow up to')}
        type="number"
        hint={trans.__('no growth')}
      />
      <Text
        {...field}
        name="min_gpus"
        label={trans.__('If one fails, go on with')}
        type="number"
        hint={trans.__('as many')}
      />
    </>
  );
}

/** How the workers start, and what of their host they get. */
function Workers(field: IFieldProps): JSX.Element {
  const { trans } = field;
  return (
    <Fold {...field} label={trans.__('Workers and their Python')} names={WORKERS}>
      <Text {...field} name="cpus" label={trans.__('CPUs of each')} type="number" hint={trans.__('any')} />
      <Text {...field} name="memory" label={trans.__('Memory of each')} hint={trans.__('64GB')} />
      <Text {...field} name="python" label={trans.__('Python')} hint={trans.__('a path there')} />
      <Text {...field} name="working_directory" label={trans.__('Folder')} hint={trans.__('a path there')} />
      <Text {...field} name="pre_import" label={trans.__('Import ahead')} hint={trans.__('cudf, torch')} />
      <Lines
        {...field}
        name="variables"
        label={trans.__('Environment variables')}
        hint={'OMP_NUM_THREADS=4'}
      />
      <Lines {...field} name="options" label={trans.__('Options of dask-cuda')} hint={'rmm_pool_size=0.8'} />
    </Fold>
  );
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
  const time = own?.default_time || model.defaults?.time_limit;
  return time ? trans.__('usually %1', duration(time)) : '2h';
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
