/**
 * What this person may do here, and why not: the Jupyter server has a say in it, and the pool's token.
 *
 * Rule 1: nothing is guarded here, only said beforehand: the server and the pool refuse for themselves.
 */

import type { TranslationBundle } from '@jupyterlab/translation';

import type { IPoolModel } from './tokens';

/** What something needs of the Jupyter server: to change leases, or to run something of theirs. */
export type Need = 'write' | 'execute';

/** Say why something would be refused; empty: it would not, or nothing is known yet. */
export function forbidden(model: IPoolModel, need: Need, trans: TranslationBundle): string {
  if (model.stand?.may[need] === false) {
    return need === 'write'
      ? trans.__(
          'You can look, and change nothing: this Jupyter server gives you read-only access to the pool.'
        )
      : trans.__('This Jupyter server does not let you open the dashboards of leases.');
  }
  if (need === 'write' && model.pool && !model.pool.user.scopes.includes('use')) {
    return trans.__('You can look, and change nothing: your token for the pool is a read-only one.');
  }
  return '';
}

/** Call back whenever something is forbidden or allowed that was not before. */
export function onRights(model: IPoolModel, trans: TranslationBundle, changed: () => void): void {
  const rights = (): string => forbidden(model, 'write', trans) + forbidden(model, 'execute', trans);
  let before = rights();
  model.stateChanged.connect(() => {
    const now = rights();
    if (now !== before) {
      before = now;
      changed();
    }
  });
}
