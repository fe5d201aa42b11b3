/**
 * What the pool tells a person, as notifications with something to do.
 *
 * Which notice becomes what is a table; a notice that is not in it is not shown.
 */

import { Notification } from '@jupyterlab/apputils';
import type { TranslationBundle } from '@jupyterlab/translation';
import type { CommandRegistry } from '@lumino/commands';

import { CommandIDs } from './tokens';
import type { Notice } from './types';

type Level = 'info' | 'success' | 'warning' | 'error';

interface IShown {
  level: Level;
  /** Commands that the notification offers. */
  actions: { command: string; label: (trans: TranslationBundle) => string }[];
  /** How long it stays in milliseconds; none: until it is dismissed. */
  stays?: number;
}

const USE = { command: CommandIDs.use, label: (trans: TranslationBundle) => trans.__('Use in notebook') };
const KEEP = { command: CommandIDs.keep, label: (trans: TranslationBundle) => trans.__('Keep') };
const EXTEND = { command: CommandIDs.extend, label: (trans: TranslationBundle) => trans.__('Extend') };
const LOGS = { command: CommandIDs.logs, label: (trans: TranslationBundle) => trans.__('Logs') };
const OPEN = { command: CommandIDs.open, label: (trans: TranslationBundle) => trans.__('Show the pool') };
const ASK = { command: CommandIDs.request, label: (trans: TranslationBundle) => trans.__('Request anew') };

/** How each kind of notice is shown. */
export const SHOWN: Readonly<Record<string, IShown>> = {
  granted: { level: 'info', actions: [OPEN], stays: 5000 },
  started: { level: 'success', actions: [USE], stays: 10_000 },
  failed: { level: 'error', actions: [LOGS, ASK] },
  migrating: { level: 'warning', actions: [OPEN], stays: 10_000 },
  migrated: { level: 'success', actions: [OPEN], stays: 10_000 },
  shrunk: { level: 'warning', actions: [OPEN], stays: 10_000 },
  overuse: { level: 'warning', actions: [LOGS] },
  grown: { level: 'info', actions: [OPEN], stays: 5000 },
  reclaim: { level: 'warning', actions: [OPEN] },
  suspended: { level: 'warning', actions: [OPEN] },
  restarted: { level: 'warning', actions: [USE] },
  resumed: { level: 'success', actions: [USE], stays: 10_000 },
  idle: { level: 'warning', actions: [KEEP] },
  expiring: { level: 'warning', actions: [EXTEND] },
  ended: { level: 'info', actions: [ASK], stays: 10_000 },
  device: { level: 'warning', actions: [OPEN], stays: 10_000 }
};

/** Notifications hold so many characters. */
const LONGEST = 140;

/** Show a notice. */
export function show(notice: Notice, commands: CommandRegistry, trans: TranslationBundle): void {
  const how = SHOWN[notice.notice];
  if (!how) {
    return;
  }
  const text = notice.sentence;
  Notification.emit(text.length > LONGEST ? `${text.slice(0, LONGEST - 1)}…` : text, how.level, {
    autoClose: how.stays ?? false,
    actions: how.actions.map(each => ({
      label: each.label(trans),
      callback: () => void commands.execute(each.command, notice.lease ? { lease: notice.lease } : {})
    }))
  });
}
