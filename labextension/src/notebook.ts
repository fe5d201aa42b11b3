/**
 * Code that uses a lease, put into a notebook: the one that is open, or a new one.
 *
 * It is done by the notebook's own commands, so that this extension needs none of its code.
 */

import type { JupyterFrontEnd } from '@jupyterlab/application';

import type { Lease } from './types';

/** What a notebook panel has of use here. */
interface IPanel {
  context?: { ready: Promise<void> };
  sessionContext?: { ready: Promise<void> };
}

/** The code by which a notebook uses a lease. */
export function leaseCode(lease: Lease): string {
  return [
    'from jupyter_gpupool import Pool',
    '',
    `lease = Pool().lease(${JSON.stringify(lease.id)})  # ${lease.name}`,
    'client = lease.client()  # a plain distributed.Client',
    'client'
  ].join('\n');
}

/**
 * Put code into a new cell of the notebook that is open, or of a new one.
 *
 * @returns Whether it is there. Notebook 7 has a page a notebook: a new one is out of reach of the page of files.
 */
export async function insertCode(app: JupyterFrontEnd, code: string): Promise<boolean> {
  const { commands } = app;
  if (!commands.isEnabled('notebook:insert-cell-below')) {
    const panel = (await commands.execute('notebook:create-new', { kernelName: await kernel(app) })) as
      IPanel | undefined;
    if (!panel?.context) {
      return false;
    }
    await panel.context.ready;
    await new Promise(done => setTimeout(done, 0));
  } else {
    await commands.execute('notebook:insert-cell-below');
  }
  await commands.execute('notebook:replace-selection', { text: code });
  return true;
}

/** The kernel of new notebooks: the server's default, so that nobody is asked. */
async function kernel(app: JupyterFrontEnd): Promise<string> {
  await app.serviceManager.kernelspecs.ready;
  return app.serviceManager.kernelspecs.specs?.default ?? 'python3';
}
