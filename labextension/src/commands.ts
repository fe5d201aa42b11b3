/**
 * What a person can do, as commands: in the palette, in menus, behind the buttons of the views.
 *
 * Rule 1: questions are asked here, and only where something would be lost.
 * Rule 2: what goes wrong is told as a notification: its sentence, and what to do.
 */

import {
  Clipboard,
  Dialog,
  ICommandPalette,
  InputDialog,
  MainAreaWidget,
  Notification,
  showDialog
} from '@jupyterlab/apputils';
import type { JupyterFrontEnd } from '@jupyterlab/application';
import type { TranslationBundle } from '@jupyterlab/translation';
import { refreshIcon } from '@jupyterlab/ui-components';
import type { CommandRegistry } from '@lumino/commands';
import type { ReadonlyPartialJSONObject } from '@lumino/coreutils';
import { Widget } from '@lumino/widgets';

import { clock, duration } from './format';
import { standing } from './leases';
import { insertCode, leaseCode } from './notebook';
import { poolIcon } from './icons';
import { Problem } from './request';
import { forbidden, Need, onRights } from './rights';
import { CommandIDs, IPoolModel } from './tokens';
import type { HealthAction, Lease } from './types';

/** What the commands need. */
export interface IContext {
  app: JupyterFrontEnd;
  model: IPoolModel;
  trans: TranslationBundle;
}

type Do = (context: IContext, lease: Lease, args: ReadonlyPartialJSONObject) => Promise<void>;
/** A command on a lease: its name, what it needs of the server besides reading, its label, and what it does. */
type OnLease = [string, Need | null, string, Do];

/** Tell what went wrong. */
export function tell(error: unknown): void {
  const problem = Problem.of(error);
  Notification.error(`${problem.message} ${problem.advice}`.trim(), { autoClose: 8000 });
}

const LEASE_ARGS = {
  type: 'object',
  properties: {
    lease: { type: 'string', description: 'The id of the lease; asked for where it is missing.' }
  }
} as const;

/** Add the commands on leases, the pool and its devices, and put them in the palette. */
export function addCommands(context: IContext, palette: ICommandPalette | null): void {
  const { app, model, trans } = context;
  const category = trans.__('GPU Pool');
  const add = (id: string, options: CommandRegistry.ICommandOptions): void => {
    app.commands.addCommand(id, options);
    palette?.addItem({ command: id, category });
  };
  for (const [id, need, label, act] of onLeases(trans)) {
    add(id, {
      label,
      caption: () => (need && forbidden(model, need, trans)) || '',
      icon: poolIcon,
      isEnabled: () => !need || forbidden(model, need, trans) === '',
      describedBy: { args: LEASE_ARGS },
      execute: async args => {
        try {
          const lease = await chosen(context, args.lease as string | undefined, label);
          if (lease) {
            await act(context, lease, args);
          }
        } catch (error) {
          tell(error);
        }
      }
    });
  }
  onRights(model, trans, () => app.commands.notifyCommandChanged());
  add(CommandIDs.refresh, {
    label: trans.__('Read the GPU pool again'),
    icon: refreshIcon,
    describedBy: { args: { type: 'object', properties: {} } },
    execute: () => model.refresh()
  });
  app.commands.addCommand(CommandIDs.health, {
    label: args => trans.__('Order of an administrator: %1', String(args.action ?? '')),
    describedBy: {
      args: {
        type: 'object',
        properties: {
          target: { type: 'string', description: 'A device, by its UUID, or a node.' },
          name: { type: 'string', description: 'What people call it.' },
          action: { type: 'string', enum: ['cordon', 'drain', 'uncordon', 'undrain', 'retire'] }
        },
        required: ['target', 'action']
      }
    },
    execute: args =>
      order(context, String(args.target), String(args.name ?? args.target), args.action as HealthAction)
  });
}

/** Commands on one lease. */
function onLeases(trans: TranslationBundle): OnLease[] {
  return [
    [CommandIDs.use, null, trans.__('Use a lease in a notebook'), use],
    [CommandIDs.dashboard, 'execute', trans.__('Open the Dask dashboard of a lease'), openDashboard],
    [CommandIDs.extend, 'write', trans.__('Extend a lease'), extend],
    [
      CommandIDs.keep,
      'write',
      trans.__('Keep an idle lease'),
      async ({ model }, lease) => void (await model.change(lease.id, { keep: true }))
    ],
    [CommandIDs.release, 'write', trans.__('Release a lease'), release],
    [CommandIDs.logs, null, trans.__('Show the logs of a lease'), showLogs],
    [CommandIDs.share, 'write', trans.__('Share a lease'), share],
    [CommandIDs.explain, null, trans.__('Why does a request wait?'), explain]
  ];
}

/** Find the lease that is meant; ask for it where none is named. */
async function chosen(
  { model, trans }: IContext,
  id: string | undefined,
  title: string
): Promise<Lease | null> {
  const all = [...model.leases, ...model.everyone];
  if (id) {
    return all.find(each => each.id === id) ?? ({ id, name: id, state: 'active' } as Lease);
  }
  const live = model.leases.filter(each => each.state !== 'ended');
  if (live.length === 0) {
    Notification.info(trans.__('You have no leases.'), { autoClose: 5000 });
    return null;
  }
  if (live.length === 1) {
    return live[0]!;
  }
  const items = live.map(each => `${each.name} (${standing(each, trans).word})`);
  const answer = await InputDialog.getItem({ title, items });
  return answer.button.accept ? (live[items.indexOf(answer.value ?? '')] ?? null) : null;
}

async function use({ app, trans }: IContext, lease: Lease): Promise<void> {
  const code = leaseCode(lease);
  if (!(await insertCode(app, code))) {
    Clipboard.copyToSystem(code);
    const text = trans.__('The code is in the clipboard: paste it into a cell of the notebook.');
    Notification.info(text, { autoClose: 8000 });
  }
}

async function release({ model, trans }: IContext, lease: Lease): Promise<void> {
  // Tasks run where something computes: the pool calls a lease idle when nothing has for a while.
  if (lease.state === 'active' && lease.idle_since === null) {
    const answer = await showDialog({
      title: trans.__('Release %1?', lease.name),
      body: trans.__('It is in use: its tasks end, and what its workers hold in memory is lost.'),
      buttons: [Dialog.cancelButton(), Dialog.warnButton({ label: trans.__('Release') })]
    });
    if (!answer.button.accept) {
      return;
    }
  }
  await model.release(lease.id);
}

async function extend(
  { model, trans }: IContext,
  lease: Lease,
  args: ReadonlyPartialJSONObject
): Promise<void> {
  let by = args.by as string | undefined;
  if (!by) {
    const answer = await InputDialog.getText({ title: trans.__('Extend %1 by', lease.name), text: '1h' });
    by = answer.button.accept ? (answer.value ?? '') : '';
  }
  if (by) {
    await model.change(lease.id, { extend: by });
    Notification.success(trans.__('%1 has %2 more.', lease.name, by), { autoClose: 4000 });
  }
}

async function share({ model, trans }: IContext, lease: Lease): Promise<void> {
  const answer = await InputDialog.getText({
    title: trans.__('Share %1 with', lease.name),
    label: trans.__(
      'They run code as you, and who has used it is shut out again only by a restart. Names, with commas between:'
    ),
    text: lease.shared_with.join(', ')
  });
  if (!answer.button.accept) {
    return;
  }
  const named = (answer.value ?? '').split(',').map(each => each.trim());
  const shared = await shareWith({ model, trans }, lease, named.filter(Boolean));
  if (shared?.warning) {
    Notification.warning(shared.warning, { autoClose: 8000 });
  }
}

/** Let exactly these people use a lease; where that restarts it, only if the person wants that. */
async function shareWith(
  { model, trans }: Pick<IContext, 'model' | 'trans'>,
  lease: Lease,
  share: string[]
): Promise<Lease | null> {
  try {
    return await model.change(lease.id, { share });
  } catch (error) {
    const problem = Problem.of(error);
    if (problem.reason !== 'needs_restart') {
      throw error;
    }
    const answer = await showDialog({
      title: trans.__('Restart %1?', lease.name),
      body: problem.message,
      buttons: [Dialog.cancelButton(), Dialog.warnButton({ label: trans.__('Restart') })]
    });
    return answer.button.accept ? model.change(lease.id, { share }, true) : null;
  }
}

async function explain({ model, trans }: IContext, lease: Lease): Promise<void> {
  const why = await model.explain(lease.id);
  const now = model.now();
  const start = why.expected_start
    ? [
        trans.__(
          'Expected to start about %1 (in %2).',
          clock(why.expected_start, now),
          duration(why.expected_start - now)
        )
      ]
    : [];
  const advice = why.reasons.map(each => each.advice).filter(Boolean);
  const sentences = [...why.sentences, ...start, ...advice];
  const body = new Widget();
  const list = document.createElement('ul');
  list.append(...sentences.map(each => Object.assign(document.createElement('li'), { textContent: each })));
  body.node.append(list);
  await showDialog({
    title: trans.__('Why %1 is where it is', lease.name),
    body,
    buttons: [Dialog.okButton()]
  });
}

/** Show what a lease's processes have written in a tab of its own. */
async function showLogs({ app, model, trans }: IContext, lease: Lease): Promise<void> {
  const logs = await model.logs(lease.id);
  const content = new Widget();
  content.addClass('jp-gpupool-Logs');
  for (const log of logs) {
    const head = Object.assign(document.createElement('h3'), { textContent: log.name });
    const text = Object.assign(document.createElement('pre'), {
      textContent: log.text || trans.__('(nothing)')
    });
    text.tabIndex = 0;
    content.node.append(head, text);
  }
  if (!logs.length) {
    content.node.append(trans.__('Its processes have written nothing.'));
  }
  const tab = new MainAreaWidget({ content });
  tab.title.label = trans.__('Logs of %1', lease.name);
  tab.title.icon = poolIcon;
  app.shell.add(tab, 'main');
}

async function openDashboard({ app, model, trans }: IContext, lease: Lease): Promise<void> {
  const content = new Widget();
  content.addClass('jp-gpupool-Dashboard');
  const frame = document.createElement('iframe');
  frame.title = trans.__('Dask dashboard of %1', lease.name);
  // What a lease serves is its owner's code: it gets no origin, and nothing of this page.
  frame.setAttribute('sandbox', 'allow-scripts');
  frame.src = model.dashboard(lease.id);
  content.node.append(frame);
  const tab = new MainAreaWidget({ content });
  tab.title.label = trans.__('Dask: %1', lease.name);
  tab.title.icon = poolIcon;
  app.shell.add(tab, 'main');
}

/** Carry out an administrator's order; those that take something out ask why. */
async function order(
  { model, trans }: IContext,
  target: string,
  name: string,
  action: HealthAction
): Promise<void> {
  let why = '';
  if (action === 'cordon' || action === 'drain' || action === 'retire') {
    const words = {
      cordon: trans.__('Cordon %1', name),
      drain: trans.__('Drain %1', name),
      retire: trans.__('Retire %1', name)
    };
    const answer = await InputDialog.getText({
      title: words[action],
      label: trans.__('Why? Everybody can read it.')
    });
    if (!answer.button.accept) {
      return;
    }
    why = answer.value ?? '';
  }
  try {
    await model.health(target, action, why);
  } catch (error) {
    tell(error);
  }
}
