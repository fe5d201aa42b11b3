/**
 * What stands where the widget of a lease or a pool cannot be: the HTML that was kept beside it.
 *
 * JupyterLab shows an error in its place once the page is loaded anew and the kernel is gone. This needs none of
 * the notebook's code: a notebook's panel is told by the registry of documents, and has what it renders with.
 */

import type { JupyterFrontEnd } from '@jupyterlab/application';
import { DisposableDelegate } from '@lumino/disposable';

const VIEW = 'application/vnd.jupyter.widget-view+json';
/** What the kernel writes into the metadata of what it displays. */
const OURS = 'gpupool';

interface IOutput {
  readonly metadata: Readonly<Record<string, unknown>>;
}

interface IRenderer {
  readonly node: HTMLElement;
  /** The widgets that it shows; none where there is no model to show. */
  readonly widgets?: readonly unknown[];
  renderModel(output: IOutput): Promise<void>;
  dispose(): void;
}

/** What a notebook renders its outputs with. */
interface IRenders {
  createRenderer(mimeType: string): IRenderer;
}

/** A notebook, as far as it is used here. */
interface INotebook {
  readonly content: { readonly rendermime: IRenders };
}

/** Let every notebook show the HTML of our widgets where there is no widget. */
export function keepStill(app: JupyterFrontEnd): void {
  app.docRegistry.addWidgetExtension('Notebook', {
    createNew: panel => {
      withHtml((panel as unknown as INotebook).content.rendermime);
      return new DisposableDelegate(() => undefined);
    }
  });
}

function withHtml(renders: IRenders): void {
  const create = renders.createRenderer.bind(renders);
  renders.createRenderer = mimeType => {
    const renderer = create(mimeType);
    return mimeType === VIEW ? still(renderer, () => create('text/html')) : renderer;
  };
}

/** Show HTML after each try to show a widget that has shown none; a later try may. */
function still(renderer: IRenderer, makeHtml: () => IRenderer): IRenderer {
  const render = renderer.renderModel.bind(renderer);
  renderer.renderModel = async output => {
    await render(output);
    if (OURS in output.metadata && !renderer.widgets?.length) {
      const html = makeHtml();
      await html.renderModel(output);
      if (!renderer.widgets?.length) {
        renderer.node.replaceChildren(html.node);
      }
    }
  };
  return renderer;
}
