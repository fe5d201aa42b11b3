/**
 * How a lease or a pool is drawn in a notebook's page, and what is said to the kernel.
 *
 * Rule 1: the page is built once and changed in place, so that what has the focus keeps it.
 * Rule 2: the kernel hears when a view comes into sight and when it leaves, and every PULSE_MS that it is still
 *         there; nothing is asked for while nobody looks.
 * Rule 3: no colour alone says anything, and each bar says its value to who cannot see it.
 */

const PULSE_MS = 20_000;
const TRIAL_MS = 500;
/** A kernel that runs a cell may answer only after it; a request that it then makes is seen all the same. */
const ANSWER_MS = 15_000;
const GIB = 2 ** 30;
const TIMES = ['30m', '1h', '2h', '4h', '12h'];

/** Make an element; `on…` are listeners, the rest are attributes. */
function h(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith('on')) {
      node.addEventListener(name.slice(2), value);
    } else if (value !== null && value !== undefined && value !== false) {
      node.setAttribute(name, value === true ? '' : String(value));
    }
  }
  node.append(...children);
  return node;
}

/** Say a time span in its two largest units, as the Python side does. */
function span(seconds) {
  const left = Math.max(0, Math.round(seconds));
  const parts = [
    [Math.floor(left / 86400), 'd'],
    [Math.floor((left % 86400) / 3600), 'h'],
    [Math.floor((left % 3600) / 60), 'min'],
    [left % 60, 's']
  ];
  const first = Math.max(0, parts.findIndex(([many]) => many > 0));
  const shown = left ? parts.slice(first, first + 2).filter(([many]) => many > 0) : [[0, 's']];
  return shown.map(([many, unit]) => `${many} ${unit}`).join(' ');
}

function gib(bytes) {
  const size = bytes / GIB;
  return `${size >= 10 ? size.toFixed(0) : size.toFixed(1).replace('.0', '')} GiB`;
}

function plural(many, noun) {
  return `${many} ${noun}${many === 1 ? '' : 's'}`;
}

/** A bar that says its value: `set(part, text)`, part from 0 to 1 or null. */
function bar(label) {
  const fill = h('div', { class: 'gpupool-fill' });
  const track = h('div', { class: 'gpupool-track', role: 'progressbar', 'aria-label': label }, fill);
  const words = h('span', { class: 'gpupool-value' });
  track.setAttribute('aria-valuemin', '0');
  track.setAttribute('aria-valuemax', '100');
  return {
    node: h('div', { class: 'gpupool-bar' }, track, words),
    set(part, text) {
      const known = part !== null && part !== undefined;
      fill.style.width = `${known ? Math.min(100, 100 * part) : 0}%`;
      track.toggleAttribute('data-unknown', !known);
      if (known) {
        track.setAttribute('aria-valuenow', String(Math.round(100 * part)));
      } else {
        track.removeAttribute('aria-valuenow');
      }
      track.setAttribute('aria-valuetext', text);
      words.textContent = text;
    }
  };
}

/** Keep one child for each item, by its key; `make(item)` answers with `{node, update}`. */
function list(parent, make) {
  const known = new Map();
  return (items, key) => {
    const wanted = new Set(items.map(key));
    for (const [name, child] of known) {
      if (!wanted.has(name)) {
        child.node.remove();
        known.delete(name);
      }
    }
    items.forEach((item, index) => {
      const name = key(item);
      if (!known.has(name)) {
        known.set(name, make(item));
      }
      const child = known.get(name);
      if (parent.children[index] !== child.node) {
        parent.insertBefore(child.node, parent.children[index] ?? null);
      }
      child.update(item);
    });
  };
}

function setReading(busy, memory, device) {
  const known = device.utilisation !== null && device.utilisation !== undefined;
  busy.set(known ? device.utilisation / 100 : null, known ? `${Math.round(device.utilisation)} %` : 'no reading');
  const used = device.used !== null && device.used !== undefined;
  memory.set(
    used ? device.used / device.memory : null,
    used ? `${gib(device.used)} of ${gib(device.memory)}` : `${gib(device.memory)}`
  );
}

/** A row of a lease's table: one slice. */
function sliceRow() {
  const [name, what, state] = [h('th', { scope: 'row' }), h('td'), h('td')];
  const [busy, memory] = [bar('utilisation'), bar('memory')];
  const node = h('tr', {}, name, what, h('td', {}, busy.node), h('td', {}, memory.node), state);
  return {
    node,
    update(slice) {
      name.textContent = slice.name;
      what.textContent = [slice.model, slice.part].filter(Boolean).join(', ');
      setReading(busy, memory, slice);
      const ill = slice.verdict && slice.verdict !== 'fine' ? ` (GPU: ${slice.verdict.replaceAll('_', ' ')})` : '';
      state.textContent = slice.state + ill;
    }
  };
}

/** What can be done with a lease: buttons that say on the line below what has come of it. */
function leaseButtons(ask) {
  let lease = null;
  const told = h('p', { class: 'gpupool-told', role: 'status', 'aria-live': 'polite' });
  const say = (text, wrong = false) => {
    told.textContent = text;
    told.toggleAttribute('data-wrong', wrong);
  };
  const act = async (button, what) => {
    button.disabled = true;
    say('…');
    const answer = await ask({ ...what, lease: lease.id });
    button.disabled = false;
    say(answer.wrong ?? answer.said ?? '', 'wrong' in answer);
  };
  const by = h('select', { 'aria-label': 'how much longer' }, ...TIMES.map(each => h('option', {}, each)));
  by.value = '1h';
  const extend = h('button', { type: 'button', onclick: () => act(extend, { do: 'extend', by: by.value }) }, 'Extend by');
  const keep = h('button', { type: 'button', onclick: () => act(keep, { do: 'keep' }) }, 'Keep');
  const many = h('input', { type: 'number', min: 1, step: 1, 'aria-label': 'GPUs at most' });
  const scale = h('button', { type: 'button', onclick: () => act(scale, { do: 'scale', gpus: many.value }) }, 'Scale to');
  const sure = h('button', { type: 'button', class: 'gpupool-warn', onclick: () => {
    asked(false);
    void act(release, { do: 'release' });
  } }, 'Release: its tasks end');
  const no = h('button', { type: 'button', onclick: () => asked(false) }, 'Keep it');
  const question = h('span', { class: 'gpupool-group', hidden: true }, sure, no);
  const release = h('button', { type: 'button', onclick: () => {
    if (lease.state === 'active') {
      asked(true);
    } else {
      void act(release, { do: 'release' });
    }
  } }, 'Release');
  const asked = open => {
    question.hidden = !open;
    release.hidden = open;
    (open ? no : release).focus();
  };
  const groups = {
    extend: h('span', { class: 'gpupool-group' }, extend, by),
    keep: h('span', { class: 'gpupool-group' }, keep),
    scale: h('span', { class: 'gpupool-group' }, scale, many),
    release: h('span', { class: 'gpupool-group' }, release, question)
  };
  return {
    node: h('div', {}, h('div', { class: 'gpupool-buttons' }, ...Object.values(groups)), told),
    update(said) {
      lease = said;
      for (const [name, group] of Object.entries(groups)) {
        group.hidden = !said.can.includes(name);
      }
      if (said.most && document.activeElement !== many && !many.value) {
        many.value = String(said.most);
        many.max = String(said.most);
      }
    }
  };
}

/** A lease, in full or as one of several. */
function leaseCard(ask, full) {
  const name = h('strong');
  const state = h('span', { class: 'gpupool-chip' });
  const time = h('span', { class: 'gpupool-time' });
  const words = h('p', { class: 'gpupool-words' });
  const body = h('tbody');
  const heads = ['device', 'model', 'busy', 'memory', 'slice'].map(each => h('th', { scope: 'col' }, each));
  const table = h('table', {}, h('thead', {}, h('tr', {}, ...heads)), body);
  const rows = list(body, sliceRow);
  const counts = h('p', { class: 'gpupool-counts' });
  const simulated = h('p', { class: 'gpupool-note' }, 'The GPUs are simulated.');
  const buttons = leaseButtons(ask);
  const node = h(
    'div',
    { class: 'gpupool-lease', role: 'group' },
    h('div', { class: 'gpupool-head' }, name, state, time),
    words,
    table,
    counts,
    buttons.node,
    ...(full ? [simulated] : [])
  );
  let said = null;
  const tick = () => {
    if (!said) {
      return;
    }
    const now = Date.now() / 1000;
    const idle = said.idle ? `idle for ${span(now - said.idle)}` : '';
    const left = said.ends && said.can.includes('extend') ? `${span(said.ends - now)} left` : '';
    time.textContent = [left, idle].filter(Boolean).join(', ');
  };
  return {
    node,
    tick,
    update(lease) {
      said = lease;
      node.setAttribute('aria-label', `Lease ${lease.name}, ${lease.state}`);
      name.textContent = `${lease.name}: ${plural(lease.gpus, 'GPU')}`;
      state.textContent = lease.state;
      state.dataset.state = lease.state;
      words.textContent = lease.words;
      words.hidden = !lease.words;
      table.hidden = lease.devices.length === 0;
      rows(lease.devices, each => each.name + each.part);
      counts.textContent = countsOf(lease);
      counts.hidden = !counts.textContent;
      simulated.hidden = !lease.simulated;
      buttons.update(lease);
      tick();
    }
  };
}

function countsOf(lease) {
  if (!lease.can.includes('extend')) {
    return '';
  }
  const [up, of] = lease.workers;
  const workers = `${up} of ${plural(of, 'worker')}`;
  if (lease.tasks === null) {
    return workers;
  }
  const { processing = 0, queued = 0, waiting = 0, memory = 0, erred = 0 } = lease.tasks;
  const tasks = [
    `${processing} running`,
    `${queued + waiting + (lease.tasks['no-worker'] ?? 0)} waiting`,
    `${memory} in memory`,
    erred ? `${erred} failed` : ''
  ];
  return `${workers}; tasks: ${tasks.filter(Boolean).join(', ')}`;
}

/** A device of the pool. */
function tile() {
  const [name, by] = [h('strong'), h('span', { class: 'gpupool-by' })];
  const [busy, memory] = [bar('utilisation'), bar('memory')];
  const node = h('li', { class: 'gpupool-tile' }, name, by, busy.node, memory.node);
  return {
    node,
    update(device) {
      name.textContent = device.name;
      const part = device.free < 1 && device.free > 0 ? `, ${device.free} free` : '';
      const fine = device.verdict === 'fine';
      by.textContent = fine ? (device.by.join(', ') || 'free') + part : device.verdict.replaceAll('_', ' ');
      node.dataset.state = fine ? (device.by.length ? 'taken' : 'free') : 'ill';
      node.title = [device.model, device.why].filter(Boolean).join(': ');
      setReading(busy, memory, device);
    }
  };
}

/** The form by which a request is made. */
function form(ask, fields) {
  const told = h('p', { class: 'gpupool-told', role: 'status', 'aria-live': 'polite' });
  const inputs = new Map();
  const what = () => Object.fromEntries([...inputs].map(([name, input]) => [name, input.value.trim()]).filter(each => each[1]));
  let timer = 0;
  let latest = 0;
  const say = answer => {
    told.textContent = answer.wrong ?? answer.said ?? '';
    told.toggleAttribute('data-wrong', 'wrong' in answer);
  };
  const tryIt = () => {
    clearTimeout(timer);
    timer = setTimeout(async () => {
      const mine = ++latest;
      const answer = await ask({ do: 'trial', what: what() });
      if (mine === latest) {
        say(answer);
      }
    }, TRIAL_MS);
  };
  for (const field of fields) {
    const input = field.choices
      ? h('select', { onchange: tryIt }, h('option', { value: '' }, field.hint), ...field.choices.map(each => h('option', { value: each }, each)))
      : h('input', { type: 'text', oninput: tryIt, placeholder: field.hint });
    inputs.set(field.name, input);
  }
  const send = h('button', { type: 'submit', class: 'gpupool-main' }, 'Request');
  const node = h(
    'form',
    {
      onsubmit: async event => {
        event.preventDefault();
        clearTimeout(timer);
        latest++;
        send.disabled = true;
        told.textContent = '…';
        say(await ask({ do: 'request', what: what() }));
        send.disabled = false;
      }
    },
    h(
      'div',
      { class: 'gpupool-fields' },
      ...fields.map(field => h('label', { title: field.help }, h('span', {}, field.label), inputs.get(field.name)))
    ),
    send,
    told
  );
  return h('details', { class: 'gpupool-request' }, h('summary', {}, 'Request GPUs'), node);
}

function drawLease(root, ask) {
  const card = leaseCard(ask, true);
  root.append(card.node);
  return { update: card.update, tick: card.tick };
}

function drawPool(root, ask, said) {
  const lines = h('p', { class: 'gpupool-words' });
  const tiles = h('ul', { class: 'gpupool-tiles', 'aria-label': 'Devices' });
  const more = h('p', { class: 'gpupool-note' });
  const leases = h('div', { 'aria-label': 'My leases', role: 'group' });
  const cards = new Set();
  const setTiles = list(tiles, tile);
  const setLeases = list(leases, () => {
    const card = leaseCard(ask, false);
    cards.add(card);
    return card;
  });
  root.append(lines, tiles, more, leases, form(ask, said.fields));
  return {
    update(pool) {
      lines.textContent = pool.lines.join(' ');
      setTiles(pool.devices, each => each.name);
      more.textContent = pool.more ? `and ${plural(pool.more, 'more device')}` : '';
      more.hidden = !pool.more;
      setLeases(pool.leases, each => each.id);
    },
    tick() {
      cards.forEach(card => card.tick());
    }
  };
}

/** Ask the kernel and wait for its answer. */
function asking(model, signal) {
  const open = new Map();
  let number = 0;
  const own = Math.random().toString(36).slice(2);
  const hear = message => {
    open.get(message.number)?.(message);
    open.delete(message.number);
  };
  model.on('msg:custom', hear);
  signal.addEventListener('abort', () => model.off('msg:custom', hear));
  return message =>
    new Promise(answer => {
      const mine = `${own}-${++number}`;
      open.set(mine, answer);
      model.send({ ...message, number: mine });
      setTimeout(() => hear({ number: mine, wrong: 'The kernel does not answer: it is busy, or gone.' }), ANSWER_MS);
    });
}

/** Tell the kernel whether this view is in sight. */
function sight(model, el, signal, seen) {
  const view = Math.random().toString(36).slice(2);
  let near = false;
  let shown = false;
  const tell = () => model.send({ view, shown });
  const look = () => {
    const now = near && document.visibilityState === 'visible';
    if (now !== shown) {
      shown = now;
      seen(shown);
      tell();
    }
  };
  const observer = new IntersectionObserver(entries => {
    near = entries[entries.length - 1].isIntersecting;
    look();
  });
  observer.observe(el);
  document.addEventListener('visibilitychange', look, { signal });
  const pulse = setInterval(() => shown && tell(), PULSE_MS);
  signal.addEventListener('abort', () => {
    observer.disconnect();
    clearInterval(pulse);
    if (shown) {
      shown = false;
      tell();
    }
  });
}

function render({ model, el }) {
  const end = new AbortController();
  const root = h('div', { class: 'gpupool' });
  const problem = h('p', { class: 'gpupool-told', 'data-wrong': true, role: 'alert', hidden: true });
  el.append(root);
  const said = model.get('said');
  const ask = asking(model, end.signal);
  const drawn = said.kind === 'lease' ? drawLease(root, ask) : drawPool(root, ask, said);
  root.append(problem);
  const update = () => {
    const now = model.get('said');
    drawn.update(now);
    problem.textContent = now.problem ?? '';
    problem.hidden = !now.problem;
  };
  model.on('change:said', update);
  update();
  let clock = 0;
  sight(model, root, end.signal, shown => {
    clearInterval(clock);
    if (shown) {
      clock = setInterval(() => drawn.tick(), 1000);
    }
  });
  return () => {
    model.off('change:said', update);
    clearInterval(clock);
    end.abort();
  };
}

export default { render };
