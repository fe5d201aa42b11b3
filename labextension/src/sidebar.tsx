/**
 * The sidebar: a line that says what is free, and a section a question.
 *
 * Rule 1: a section watches what it shows while it can be seen, and nothing otherwise.
 */

import type { TranslationBundle } from '@jupyterlab/translation';
import { PanelWithToolbar, ReactWidget, SidePanel, UseSignal } from '@jupyterlab/ui-components';
import type { CommandRegistry } from '@lumino/commands';
import type { IDisposable } from '@lumino/disposable';
import { Message, MessageLoop } from '@lumino/messaging';
import { AccordionPanel, Widget } from '@lumino/widgets';
import React from 'react';

import { RequestView } from './form';
import { HealthView } from './health';
import { HistoryView } from './history';
import { poolIcon } from './icons';
import { LeasesView } from './leases';
import { Button, IViewProps, READ_ONLY_ID } from './parts';
import { Free, PoolView } from './pool';
import { QueueView } from './queue';
import { forbidden } from './rights';
import { CommandIDs, IPoolModel, Topic } from './tokens';

/** A view that watches what it shows while it can be seen. */
export class View extends ReactWidget {
  constructor(
    private _props: IViewProps,
    private _topics: Topic[],
    private _view: (props: IViewProps) => JSX.Element
  ) {
    super();
    this.addClass('jp-gpupool-View');
  }

  override render(): JSX.Element {
    return <UseSignal signal={this._props.model.stateChanged}>{() => this._draw()}</UseSignal>;
  }

  override dispose(): void {
    this._stop();
    super.dispose();
  }

  protected override onAfterShow(message: Message): void {
    super.onAfterShow(message);
    this._start();
  }

  protected override onAfterAttach(message: Message): void {
    super.onAfterAttach(message);
    if (this.isVisible) {
      this._start();
    }
  }

  protected override onBeforeHide(message: Message): void {
    this._stop();
    super.onBeforeHide(message);
  }

  protected override onBeforeDetach(message: Message): void {
    this._stop();
    super.onBeforeDetach(message);
  }

  /** Draw what is seen; what is not stays as it was, so that it costs nothing and a form keeps what was typed. */
  private _draw(): JSX.Element {
    if (this._watch || !this._drawn) {
      this._drawn = this._view({ ...this._props });
    }
    return this._drawn;
  }

  private _start(): void {
    if (!this._watch) {
      this._watch = this._props.model.watch(...this._topics);
      this.update();
    }
  }

  private _stop(): void {
    this._watch?.dispose();
    this._watch = null;
  }

  private _watch: IDisposable | null = null;
  private _drawn: JSX.Element | null = null;
}

/** The sections, from top to bottom. */
interface ISection {
  id: string;
  title: string;
  topics: Topic[];
  draw: (props: IViewProps) => JSX.Element;
  open: boolean;
  /** How much of the height it gets, in proportion. */
  part: number;
}

function sections(trans: TranslationBundle, sent: () => void): ISection[] {
  return [
    {
      id: 'leases',
      title: trans.__('My leases'),
      topics: ['pool', 'leases', 'devices'],
      draw: props => <LeasesView {...props} />,
      open: true,
      part: 3
    },
    {
      id: 'request',
      title: trans.__('Request GPUs'),
      topics: ['pool', 'projects', 'devices'],
      draw: props => <RequestView {...props} sent={sent} />,
      open: false,
      part: 4
    },
    {
      id: 'pool',
      title: trans.__('Pool'),
      topics: ['pool', 'devices'],
      draw: props => <PoolView {...props} />,
      open: true,
      part: 4
    },
    {
      id: 'queue',
      title: trans.__('Queue and fair share'),
      topics: ['pool', 'queue', 'projects', 'usage'],
      draw: props => <QueueView {...props} />,
      open: false,
      part: 3
    },
    {
      id: 'history',
      title: trans.__('History'),
      topics: ['pool', 'leases', 'history'],
      draw: props => <HistoryView {...props} />,
      open: false,
      part: 3
    },
    {
      id: 'health',
      title: trans.__('Health'),
      topics: ['pool', 'devices'],
      draw: props => <HealthView {...props} />,
      open: false,
      part: 3
    }
  ];
}

/** The sidebar. */
export class PoolSidebar extends SidePanel {
  constructor(options: { model: IPoolModel; commands: CommandRegistry; trans: TranslationBundle }) {
    super();
    const { trans } = options;
    this.id = 'jp-gpupool-sidebar';
    this.addClass('jp-gpupool-Sidebar');
    this.title.icon = poolIcon;
    this.title.caption = trans.__('GPU Pool');
    this.title.dataset = { jpTabLabel: this.title.caption };
    this.node.setAttribute('role', 'region');
    this.node.setAttribute('aria-label', trans.__('GPU Pool'));
    const props: IViewProps = options;
    this.header.addWidget(new View(props, ['pool'], each => <Header {...each} />));
    this._sections = sections(trans, () => this._sent());
    this._sections.forEach(each => {
      const panel = new PanelWithToolbar();
      panel.id = `jp-gpupool-${each.id}`;
      panel.title.label = each.title;
      panel.addClass('jp-gpupool-Section');
      panel.addWidget(new View(props, each.topics, each.draw));
      this.addWidget(panel);
    });
    this._sections.forEach((each, n) => !each.open && this._accordion.collapse(n));
    this._accordion.expansionToggled.connect((_, index) => this._divide(index));
    this._divide();
    this._fitting.observe(this._accordion.node);
  }

  override dispose(): void {
    this._fitting.disconnect();
    super.dispose();
  }

  /** Open a section; the form gets the room of the tiles. */
  reveal(id: string): void {
    const at = this._sections.findIndex(each => each.id === id);
    if (at < 0) {
      return;
    }
    if (id === 'request') {
      this._sections.forEach((each, n) => each.id !== id && this._accordion.collapse(n));
    } else {
      const form = this._sections.findIndex(each => each.id === 'request');
      this._accordion.collapse(form);
      this._sections.forEach((each, n) => each.open && this._accordion.expand(n));
    }
    this._accordion.expand(at);
  }

  /** Show the leases when the form is sent; the focus, which the form takes away with it, goes there too. */
  private _sent(): void {
    this.reveal('leases');
    const at = this._sections.findIndex(each => each.id === 'leases');
    this._accordion.titles[at]?.focus();
  }

  /** Open the form and put the cursor into it, as soon as it is drawn. */
  ask(): void {
    this.reveal('request');
    const focus = (tries: number): void => {
      const form = this.node.querySelector('.jp-gpupool-Form');
      const field = form?.querySelector<HTMLElement>('.jp-gpupool-Field input');
      if (field?.offsetParent) {
        field.focus();
      } else if (tries > 0) {
        setTimeout(() => focus(tries - 1), 50);
      }
    };
    focus(60);
  }

  /** Share the height among the sections that are open; the one just opened gets more. */
  private _divide(opened = -1): void {
    const sizes = this._sections.map((each, n) => {
      const open = this._accordion.widgets[n]?.isHidden === false;
      return open ? each.part * (n === opened ? 1.5 : 1) : 0;
    });
    if (sizes.some(size => size > 0)) {
      this._accordion.setRelativeSizes(sizes);
    }
  }

  private get _accordion(): AccordionPanel {
    return this.content as AccordionPanel;
  }

  private _sections: ISection[];
  /** The header grows when the pool is known, which no message tells the sections below: they would not fit. */
  private _fitting = new ResizeObserver(() =>
    MessageLoop.postMessage(this._accordion, Widget.ResizeMessage.UnknownSize)
  );
}

/** What is free, whether it is real, and the button that most people come for. */
function Header(props: IViewProps): JSX.Element {
  const { model, commands, trans } = props;
  const pool = model.pool;
  if (!pool) {
    return <></>;
  }
  const off = forbidden(model, 'write', trans);
  return (
    <div className="jp-gpupool-Header">
      <Free pool={pool} trans={trans} />
      {pool.simulated && (
        <p className="jp-gpupool-Simulated" title={pool.simulated_note}>
          <strong>{trans.__('Simulated GPUs')}</strong> {trans.__('No computation runs on a GPU here.')}
        </p>
      )}
      {pool.trust_users && (
        <p className="jp-gpupool-Simulated">
          {trans.__('All people of this pool run as one user and are trusted.')}
        </p>
      )}
      {off && (
        <p id={READ_ONLY_ID} className="jp-gpupool-Simulated">
          {off}
        </p>
      )}
      <Button
        label={trans.__('Request GPUs')}
        press={() => void commands.execute(CommandIDs.request)}
        off={off}
        main
      />
    </div>
  );
}
