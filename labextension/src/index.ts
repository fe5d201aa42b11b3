/**
 * The sidebar of jupyter-gpupool: small plugins around one model.
 *
 * Rule 1: what only JupyterLab has (launcher, status bar, layout) is optional: Notebook 7 loads all this too.
 */

import { ILayoutRestorer, JupyterFrontEnd, JupyterFrontEndPlugin } from '@jupyterlab/application';
import { ICommandPalette } from '@jupyterlab/apputils';
import { ILauncher } from '@jupyterlab/launcher';
import { IConnectionStatus } from '@jupyterlab/services';
import { ISettingRegistry } from '@jupyterlab/settingregistry';
import { IStatusBar } from '@jupyterlab/statusbar';
import { ITranslator, nullTranslator } from '@jupyterlab/translation';

import { addCommands } from './commands';
import { poolIcon } from './icons';
import { PoolModel } from './model';
import { show } from './notices';
import { forbidden } from './rights';
import { PoolSidebar } from './sidebar';
import { StatusItem } from './status';
import { keepStill } from './still';
import { CommandIDs, IPoolModel } from './tokens';

export { CommandIDs, IPoolModel } from './tokens';

/** The domain of translations, and of the settings. */
const DOMAIN = 'jupyter_gpupool';
const SETTINGS = 'jupyter-gpupool:plugin';
/** Ranks from 501 to 899 are for extensions of others. */
const RANK = 501;

const model: JupyterFrontEndPlugin<IPoolModel> = {
  id: 'jupyter-gpupool:model',
  description: 'The pool of GPUs as this person sees it.',
  provides: IPoolModel,
  optional: [IConnectionStatus, ISettingRegistry],
  activate: (
    app: JupyterFrontEnd,
    connection: IConnectionStatus | null,
    settings: ISettingRegistry | null
  ) => {
    const pool = new PoolModel({
      serverSettings: app.serviceManager.serverSettings,
      events: app.serviceManager.events.stream,
      connected: () => connection?.isConnected ?? true
    });
    void settings?.load(SETTINGS).then(loaded => {
      const apply = (): void => {
        pool.interval = 1000 * (loaded.get('readingsInterval').composite as number);
      };
      apply();
      loaded.changed.connect(apply);
    });
    return pool;
  }
};

const sidebar: JupyterFrontEndPlugin<void> = {
  id: SETTINGS,
  description: 'The sidebar: pool, request, leases, queue, history, health.',
  autoStart: true,
  requires: [IPoolModel],
  optional: [ICommandPalette, ILayoutRestorer, ITranslator],
  activate: (
    app: JupyterFrontEnd,
    pool: IPoolModel,
    palette: ICommandPalette | null,
    restorer: ILayoutRestorer | null,
    translator: ITranslator | null
  ) => {
    const trans = (translator ?? nullTranslator).load(DOMAIN);
    const panel = new PoolSidebar({ model: pool, commands: app.commands, trans });
    app.shell.add(panel, 'left', { rank: RANK, type: 'GPU Pool' });
    restorer?.add(panel, panel.id);
    const category = trans.__('GPU Pool');
    const args = { type: 'object', properties: {} } as const;
    app.commands.addCommand(CommandIDs.open, {
      label: trans.__('Show the GPU Pool'),
      icon: poolIcon,
      describedBy: { args },
      execute: () => app.shell.activateById(panel.id)
    });
    app.commands.addCommand(CommandIDs.request, {
      label: options =>
        options.isLauncher || options.isPalette ? trans.__('Request GPUs') : trans.__('Request GPUs…'),
      caption: () => forbidden(pool, 'write', trans) || trans.__('Request GPUs of the pool'),
      icon: poolIcon,
      describedBy: { args },
      isEnabled: () => forbidden(pool, 'write', trans) === '',
      execute: () => {
        app.shell.activateById(panel.id);
        panel.ask();
      }
    });
    palette?.addItem({ command: CommandIDs.open, category });
    palette?.addItem({ command: CommandIDs.request, category, args: { isPalette: true } });
  }
};

const commands: JupyterFrontEndPlugin<void> = {
  id: 'jupyter-gpupool:commands',
  description: 'What can be done with leases, as commands.',
  autoStart: true,
  requires: [IPoolModel],
  optional: [ICommandPalette, ITranslator],
  activate: (
    app: JupyterFrontEnd,
    pool: IPoolModel,
    palette: ICommandPalette | null,
    translator: ITranslator | null
  ) => addCommands({ app, model: pool, trans: (translator ?? nullTranslator).load(DOMAIN) }, palette)
};

const launcher: JupyterFrontEndPlugin<void> = {
  id: 'jupyter-gpupool:launcher',
  description: 'A card to request GPUs.',
  autoStart: true,
  optional: [ILauncher],
  activate: (_: JupyterFrontEnd, cards: ILauncher | null) => {
    cards?.add({ command: CommandIDs.request, category: 'Other', rank: 5, args: { isLauncher: true } });
  }
};

const status: JupyterFrontEndPlugin<void> = {
  id: 'jupyter-gpupool:status',
  description: 'My GPUs and what is free, in the status bar.',
  autoStart: true,
  requires: [IPoolModel],
  optional: [IStatusBar, ITranslator],
  activate: (
    app: JupyterFrontEnd,
    pool: IPoolModel,
    bar: IStatusBar | null,
    translator: ITranslator | null
  ) => {
    if (!bar) {
      return;
    }
    const trans = (translator ?? nullTranslator).load(DOMAIN);
    const item = new StatusItem(pool, trans, () => void app.commands.execute(CommandIDs.open));
    bar.registerStatusItem('jupyter-gpupool:status', { item, align: 'left', rank: 50, isActive: () => true });
    void app.restored.then(() => pool.watch('pool', 'leases'));
  }
};

const notifications: JupyterFrontEndPlugin<void> = {
  id: 'jupyter-gpupool:notifications',
  description: 'What the pool tells, as notifications.',
  autoStart: true,
  requires: [IPoolModel],
  optional: [ISettingRegistry, ITranslator],
  activate: async (
    app: JupyterFrontEnd,
    pool: IPoolModel,
    settings: ISettingRegistry | null,
    translator: ITranslator | null
  ) => {
    const trans = (translator ?? nullTranslator).load(DOMAIN);
    let silenced: string[] = [];
    pool.noticed.connect((_, notice) => {
      if (!silenced.includes(notice.notice)) {
        show(notice, app.commands, trans);
      }
    });
    void app.restored.then(() => pool.watch('pool'));
    const loaded = await settings?.load(SETTINGS);
    const apply = (): void => {
      silenced = loaded?.get('silencedNotices').composite as string[];
    };
    if (loaded) {
      apply();
      loaded.changed.connect(apply);
    }
  }
};

const still: JupyterFrontEndPlugin<void> = {
  id: 'jupyter-gpupool:still',
  description: 'The HTML of a widget where the widget cannot be shown.',
  autoStart: true,
  activate: keepStill
};

export default [model, sidebar, commands, launcher, status, notifications, still];
