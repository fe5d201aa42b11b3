/**
 * The pool's icon: a chip with its pins.
 */

import { LabIcon } from '@jupyterlab/ui-components';

const PINS = [7, 11, 15]
  .map(at => `M${at} 1h2v3h-2zM${at} 20h2v3h-2zM1 ${at}h3v2h-3zM20 ${at}h3v2h-3z`)
  .join('');

export const poolIcon = new LabIcon({
  name: 'jupyter-gpupool:pool',
  svgstr: `<svg xmlns="http://www.w3.org/2000/svg" width="16" viewBox="0 0 24 24">
  <path class="jp-icon3" fill="#616161" fill-rule="evenodd" d="M5 5h14v14H5zM8 8v3.5h3.5V8zM12.5 8v3.5H16V8zM8 12.500v3.5h3.5v-3.5z${PINS}"/>
</svg>`
});
