/**
 * The status bar's item: how many GPUs are mine, and how many of the pool are free.
 */

import type { TranslationBundle } from '@jupyterlab/translation';
import { ReactWidget, UseSignal } from '@jupyterlab/ui-components';
import React from 'react';

import { gpus } from './format';
import { poolIcon } from './icons';
import type { IPoolModel } from './tokens';

/** The item. */
export class StatusItem extends ReactWidget {
  constructor(
    private _model: IPoolModel,
    private _trans: TranslationBundle,
    private _open: () => void
  ) {
    super();
    this.addClass('jp-gpupool-Status');
  }

  override render(): JSX.Element {
    return <UseSignal signal={this._model.stateChanged}>{() => this._draw()}</UseSignal>;
  }

  private _draw(): JSX.Element {
    const { pool, leases } = this._model;
    const trans = this._trans;
    if (!pool) {
      return <></>;
    }
    const mine = leases
      .filter(each => each.user === pool.user.name && ['active', 'starting', 'draining'].includes(each.state))
      .reduce((sum, each) => sum + each.gpus, 0);
    const text = trans.__('GPUs: %1 mine, %2 free', gpus(mine), gpus(pool.gpus_free));
    const title = pool.simulated ? `${text}. ${pool.simulated_note}` : text;
    return (
      <button className="jp-gpupool-Status-button" onClick={this._open} title={title}>
        <poolIcon.react tag="span" width="14px" /> {text}
        {pool.simulated ? ` (${trans.__('simulated')})` : ''}
      </button>
    );
  }
}
