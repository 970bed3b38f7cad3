'use strict';
// Everything shown comes from a run and is untrusted: it reaches the page as text nodes only.
const $ = (id) => document.getElementById(id);
const SOURCE = ['PROMPT', 'POLICY', 'ENV'];
const COLUMNS = ['line', 'phase', 'step', 'group', 'member', 'env', 'status', 'stop', 'reward', 'success', 'turns', 'tokens', 'sampled', 'malformed', 'embedded'];
const SHOWN = { line: '#', phase: 'phase', step: 'step', group: 'group', member: 'member', status: 'status', stop: 'stop reason', reward: 'reward', success: 'success', turns: 'turns', tokens: 'tokens', malformed: 'malformed' };
const NUMERIC = new Set(['line', 'step', 'member', 'reward', 'turns', 'tokens', 'malformed']);
const NO_TURN = { message: {}, reward: null, finish_reason: 'no turn is recorded for this reply' };
const FAILED = (episode) => episode.status !== 'completed' && episode.status !== 'truncated';
const state = { data: null, episodes: [], listed: [], limit: 200, sort: ['line', 1], line: null, tokens: [], pinned: null, colour: 'provenance', opening: 0 };

function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === 'class') node.className = value;
    else if (key.startsWith('on')) node.addEventListener(key.slice(2), value);
    else node.setAttribute(key, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined).map((child) => (child instanceof Node ? child : String(child))));
  return node;
}
function svg(tag, attributes, text) {
  const node = document.createElementNS('http://www.w3.org/2000/svg', tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  return node;
}
function number(value, digits = 4) {
  if (value === null || value === undefined) return '–';
  if (value === 0 || Number.isInteger(value)) return value.toLocaleString('en');
  const size = Math.abs(value);
  return size >= 1000 ? value.toLocaleString('en', { maximumFractionDigits: 0 }) : size < 1e-3 ? value.toExponential(1) : String(Number(value.toPrecision(digits)));
}
const tick = (value, range) => (Math.abs(value) >= 1000 ? number(value, 2) : value.toFixed(Math.min(6, Math.max(0, 1 - Math.floor(Math.log10(range))))).replace(/\.0*$|(\.\d*?)0+$/, '$1').replace(/^-0$/, '0'));
const signed = (value) => (value === null || value === undefined ? '–' : (value > 0 ? '+' : '') + number(value));
const percent = (value) => `${(100 * value).toFixed(value > 0 && value < 0.1 ? 1 : 0)} %`;
async function unpack(id) {
  const packed = Uint8Array.from(atob($(id).textContent), (character) => character.charCodeAt(0));
  return new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream('gzip'))).json();
}

// ---- facts -----------------------------------------------------------------------------------------------
function drawFacts() {
  const { curves, evaluations, num_episodes, num_failed, num_embedded } = state.data;
  const fact = (value, label, tone = '') => el('div', { class: 'fact' }, el('b', { class: tone }, value), el('span', {}, label));
  const facts = [];
  if (curves.steps.length) facts.push(fact(number(curves.steps.at(-1)), 'last step'));
  facts.push(fact(number(num_episodes), 'episodes'));
  const success = curves.series.find((series) => series.key === 'success')?.values.filter((value) => value !== null) ?? [];
  if (success.length) {
    const share = Math.max(1, Math.round(success.length / 10));
    const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
    facts.push(fact(`${percent(mean(success.slice(0, share)))} → ${percent(mean(success.slice(-share)))}`, 'train success, first → last tenth'));
  }
  for (const point of evaluations.length > 4 ? [evaluations[0], evaluations.at(-1)] : evaluations) {
    facts.push(fact(percent(point.success), `${point.phase.replace('_', ' ')} success, n = ${point.n}`));
  }
  facts.push(fact(number(num_failed), 'failed (no reward)', num_failed ? 'bad' : ''));
  const malformed = state.episodes.reduce((sum, episode) => sum + episode.malformed, 0);
  facts.push(fact(number(malformed), 'malformed calls', malformed ? 'bad' : ''));
  $('facts').append(...facts);
  const left = num_episodes - num_embedded;
  if (left > 0) {
    const unlisted = num_episodes - state.episodes.length;
    $('notice').hidden = false;
    $('notice').textContent = `${number(num_embedded)} of ${number(num_episodes)} episodes are embedded with their tokens; ${number(left)} were left out to keep this page small` + (unlisted ? `, ${number(unlisted)} of them from the table too` : '') + '. `agentgym episodes` prints all of them.';
  }
}

function drawRepeats() {
  const scores = state.data.at_k.filter((each) => each.k.some((at) => at.k > 1));
  $('repeats').hidden = !scores.length;
  const told = (at, name) => number(at[name], 3) + (at[`${name}_interval`] ? ` [${at[`${name}_interval`].map((end) => number(end, 3)).join(', ')}]` : '');
  for (const each of scores) {
    const name = `${each.env ?? 'all'}${each.difficulty === null ? '' : `, difficulty ${each.difficulty}`}: ${each.num_tasks}`;
    $('atk').append(...each.k.map((at, i) => el('tr', {}, el('td', {}, i ? '' : name), el('td', { class: 'n' }, at.k),
      ...['pass_at_k', 'pass_hat_k', 'best_at_k'].map((key) => el('td', {}, told(at, key))),
      el('td', {}, at.num_short ? `tasks with fewer episodes: ${at.num_short}` : ''))));
  }
}
function drawSigns() {
  const { signs } = state.data;
  $('signs').hidden = !signs.length;
  for (const { text, step, last } of signs) {
    const when = last === step ? `step ${step}` : `steps ${step}–${last}`;
    $('signs').append(el('li', {}, el('b', { class: 'bad' }, when), ` ${text}`));
  }
}

// ---- curves ----------------------------------------------------------------------------------------------
const W = 272, H = 132, LEFT = 42, RIGHT = 8, TOP = 8, BOTTOM = 20;
function drawCharts() {
  const { curves, evaluations } = state.data;
  const charts = curves.series.map((series) => chart(series, curves.steps, ['success', 'reward_mean'].includes(series.key) ? evaluations : []));
  $('curves').hidden = !charts.length;
  $('extra').parentElement.hidden = !charts.some((each) => each.extra);
  const point = (step) => charts.forEach((each) => each.point(step));
  for (const each of charts) {
    each.svg.addEventListener('pointermove', (event) => point(each.nearest(event)));
    each.svg.addEventListener('pointerleave', () => point(null));
    each.svg.addEventListener('click', (event) => filterStep(curves.steps[each.nearest(event)]));
    $(each.extra ? 'extra' : 'charts').append(each.node);
  }
}
function chart(series, steps, evaluations) {
  const values = series.values, marks = evaluations.map((each) => [each.step, each[series.key], each]);
  const known = [...values.filter((value) => value !== null), ...marks.map((mark) => mark[1])];
  let low = Math.min(...known), high = Math.max(...known);
  if (series.key === 'success') [low, high] = [0, 1];
  if (low === high) [low, high] = low === 0 ? [0, 1] : [Math.min(low, 0), Math.max(high, 0)];
  const xs = [...steps, ...marks.map((mark) => mark[0])], first = Math.min(...xs), last = Math.max(...xs, first + 1);
  const x = (step) => LEFT + ((step - first) / (last - first)) * (W - LEFT - RIGHT), y = (value) => TOP + (1 - (value - low) / (high - low)) * (H - TOP - BOTTOM);
  const root = svg('svg', { viewBox: `0 0 ${W} ${H}`, role: 'img', 'aria-label': series.title });
  for (const value of [low, (low + high) / 2, high]) {
    root.append(svg('line', { class: 'grid', x1: LEFT, x2: W - RIGHT, y1: y(value), y2: y(value) }), svg('text', { x: LEFT - 5, y: y(value) + 3.5, 'text-anchor': 'end' }, tick(value, high - low)));
  }
  root.append(svg('text', { x: LEFT, y: H - 5 }, `step ${number(first)}`), svg('text', { x: W - RIGHT, y: H - 5, 'text-anchor': 'end' }, number(last)));
  const path = (points) => {
    let drawn = '', open = false;
    points.forEach((value, i) => { if (value !== null) drawn += `${open ? 'L' : 'M'}${x(steps[i]).toFixed(1)} ${y(value).toFixed(1)}${open || (points[i + 1] ?? null) !== null ? '' : 'm-3 0h6'}`; open = value !== null; });
    return drawn;
  };
  const smoothed = values.length > 40;
  root.append(svg('path', { class: smoothed ? 'raw faint' : 'raw', d: path(values) }));
  if (smoothed) root.append(svg('path', { class: 'raw', d: path(smooth(values)) }));
  for (const [step, value, each] of marks) {
    const mark = svg('path', { class: 'mark', d: `M${x(step)} ${y(value) - 6}l6 6l-6 6l-6 -6z` });
    mark.append(svg('title', {}, `${each.phase.replace('_', ' ')} at step ${step}: ${number(value)} (n = ${each.n})`));
    root.append(mark);
  }
  const cursor = svg('line', { class: 'cursor', y1: TOP, y2: H - BOTTOM, visibility: 'hidden' }), dot = svg('circle', { class: 'dot', r: 3.2, visibility: 'hidden' });
  root.append(cursor, dot);
  const readout = el('span'), idle = () => { const end = values.findLast((value) => value !== null) ?? marks.at(-1)?.[1]; readout.textContent = number(end); };
  idle();
  return {
    node: el('div', { class: 'chart' }, el('p', {}, el('b', {}, series.title), readout), root), svg: root, extra: series.extra,
    nearest(event) {
      const box = root.getBoundingClientRect(), at = first + (((event.clientX - box.left) / box.width) * W - LEFT) / (W - LEFT - RIGHT) * (last - first);
      return steps.reduce((best, step, i) => (Math.abs(step - at) < Math.abs(steps[best] - at) ? i : best), 0);
    },
    point(i) {
      const shown = i === null ? 'hidden' : 'visible';
      cursor.setAttribute('visibility', shown);
      dot.setAttribute('visibility', i !== null && values[i] !== null ? 'visible' : 'hidden');
      if (i === null) return idle();
      cursor.setAttribute('x1', x(steps[i])); cursor.setAttribute('x2', x(steps[i]));
      if (values[i] !== null) { dot.setAttribute('cx', x(steps[i])); dot.setAttribute('cy', y(values[i])); }
      readout.textContent = `step ${steps[i]} · ${number(values[i], 3)}`;
    },
  };
}
function smooth(values) {
  const keep = 1 - 1 / Math.max(1, values.length / 20);
  let total = 0, weight = 0;
  return values.map((value) => (value === null ? null : ((total = keep * total + value), (weight = keep * weight + 1), total / weight)));
}

// ---- table -----------------------------------------------------------------------------------------------
function drawFilters() {
  const form = $('filters');
  for (const name of ['phase', 'status', 'stop']) {
    const counts = new Map();
    for (const episode of state.episodes) counts.set(episode[name], (counts.get(episode[name]) ?? 0) + 1);
    form[name].append(el('option', { value: '' }, 'any'), ...[...counts].sort().map(([value, count]) => el('option', { value }, `${value} (${count})`)));
  }
  form.addEventListener('input', list);
  form.addEventListener('submit', (event) => event.preventDefault());
  form.addEventListener('reset', () => setTimeout(list));
  $('more').addEventListener('click', () => { state.limit += 1000; drawRows(); });
  $('head').append(...Object.entries(SHOWN).map(([name, title]) => el('th', { class: NUMERIC.has(name) ? 'n' : '', title: 'sort', onclick: () => sortBy(name) }, title)));
}
function filterStep(step) {
  const form = $('filters');
  form.from.value = form.to.value = step;
  list();
  $('episodes').scrollIntoView({ behavior: 'smooth' });
}
function sortBy(name) {
  state.sort = [name, state.sort[0] === name ? -state.sort[1] : 1];
  list();
}
function list() {
  const form = $('filters'), from = form.from.value === '' ? -Infinity : Number(form.from.value), to = form.to.value === '' ? Infinity : Number(form.to.value);
  const wanted = form.group.value.trim().toLowerCase(), [key, sign] = state.sort;
  state.listed = state.episodes.filter((each) =>
    (!form.phase.value || each.phase === form.phase.value) && (!form.status.value || each.status === form.status.value) && (!form.stop.value || each.stop === form.stop.value)
    && each.step >= from && each.step <= to && (!wanted || each.group.toLowerCase().includes(wanted)) && (form.success.value === '' || each.success === (form.success.value === '1'))
    && (!form.malformed.checked || each.malformed > 0) && (!form.embedded.checked || each.embedded));
  const value = (each) => (each[key] === null ? -Infinity : each[key]);
  state.listed.sort((a, b) => sign * (value(a) < value(b) ? -1 : value(a) > value(b) ? 1 : 0) || a.line - b.line);
  state.limit = 200;
  drawRows();
}
function drawRows() {
  $('count').textContent = `${number(state.listed.length)} of ${number(state.episodes.length)}`;
  $('rows').replaceChildren(...state.listed.slice(0, state.limit).map(tableRow));
  $('more').hidden = state.listed.length <= state.limit;
}
function tableRow(episode) {
  const success = episode.success === null ? el('span', { class: 'soft' }, '–') : el('span', { class: episode.success ? 'good' : 'bad' }, episode.success ? 'yes' : 'no');
  const text = { ...episode, reward: number(episode.reward), success };
  const cells = Object.keys(SHOWN).map((name) => {
    const tone = (name === 'status' && FAILED(episode)) || (name === 'malformed' && episode.malformed) ? ' bad' : '';
    return el('td', { class: (NUMERIC.has(name) ? 'n' : 'wide') + tone, ...(name === 'group' ? { title: episode.group } : {}) }, text[name]);
  });
  const kind = (episode.embedded ? '' : 'out ') + (episode.line === state.line ? 'chosen' : '');
  const hint = episode.embedded ? '' : 'tokens not embedded in this page; `agentgym episodes` prints them';
  return el('tr', { class: kind, 'data-line': episode.line, title: hint, onclick: () => { if (episode.embedded) go(episode.line, true); } }, ...cells);
}

// ---- one episode -----------------------------------------------------------------------------------------
function go(line, scroll = false) {
  history.replaceState(null, '', `#episode=${line}`);
  return openEpisode(line, scroll).catch(complain);
}
async function openEpisode(line, scroll = false) {
  const summary = state.episodes.find((episode) => episode.line === line);
  if (!summary?.embedded) {
    $('title').textContent = `Episode ${line} is not embedded in this page`;
    return;
  }
  const ticket = ++state.opening, record = await unpack(`e${line}`);
  if (ticket !== state.opening) return; // a later choice overtook this one
  state.line = line;
  state.pinned = null;
  for (const row of $('rows').children) row.classList.toggle('chosen', Number(row.dataset.line) === line);
  reveal($('rows').querySelector('.chosen'));
  drawEpisode(summary, record);
  if (scroll) $('episode').scrollIntoView({ block: 'start' });
}
function reveal(row) { // scrolls the table alone, never the page
  const table = $('rows').closest('.table');
  if (row && (row.offsetTop < table.scrollTop + 30 || row.offsetTop + row.offsetHeight > table.scrollTop + table.clientHeight)) table.scrollTop = row.offsetTop - table.clientHeight / 2;
}
function drawEpisode(summary, record) {
  $('title').textContent = `Episode ${summary.line}`;
  const fact = (label, value, tone = '') => el('span', {}, `${label} `, el('b', { class: tone }, value));
  const facts = el('div', { class: 'facts small' },
    fact('', `${summary.env} seed ${record.task.seed}`), fact('phase', summary.phase), fact('step', summary.step), fact('group', summary.group), fact('member', summary.member),
    fact('status', summary.status, FAILED(summary) ? 'bad' : summary.status === 'completed' ? 'good' : ''), fact('stopped by', summary.stop), fact('reward', number(summary.reward)),
    fact('success', summary.success === null ? '–' : summary.success ? 'yes' : 'no'), fact('tokens', `${number(summary.tokens)}, ${number(summary.sampled)} sampled`),
    ...Object.entries(record.metrics ?? {}).filter(([name, value]) => name !== 'success' && value !== 0).map(([name, value]) => fact(name, number(value))));
  const parts = [facts];
  if (record.error) parts.push(el('p', { class: 'note' }, el('b', { class: 'bad' }, 'error '), record.error));
  for (const [name, value] of Object.entries(record.info ?? {})) { // a traceback, say
    if (typeof value === 'string' && value.includes('\n')) parts.push(el('details', { class: 'said' }, el('summary', {}, name), el('pre', {}, value)));
  }
  const extras = { ...(Object.keys(record.metrics ?? {}).length ? { metrics: record.metrics } : {}), ...record.task.kwargs && Object.keys(record.task.kwargs).length ? { kwargs: record.task.kwargs } : {}, ...(record.info && Object.keys(record.info).length ? { info: record.info } : {}) };
  if (Object.keys(extras).length) parts.push(el('details', { class: 'said' }, el('summary', {}, 'metrics, task and info'), el('pre', {}, JSON.stringify(extras, null, 2))));
  $('about').replaceChildren(...parts);
  state.tokens = [];
  const turns = [];
  let turn = -1;
  record.rows.forEach((spans, row) => {
    if (record.rows.length > 1) turns.push(el('div', { class: 'turn rowhead' }, `training row ${row} of ${record.rows.length}`));
    let position = 0, sampled = 0, card = null;
    for (const [source, ids, logprobs, versions, excluded] of spans) {
      if (source === 1) turn += 1;
      const tokens = ids.map((id, i) => ({ id, source, row, position: position + i, turn, logprob: logprobs?.[i] ?? null, version: versions?.[i] ?? null, excluded, advantage: source === 1 ? record.advantages?.[row]?.[sampled + i] ?? null : null }));
      position += ids.length;
      if (source === 1) sampled += ids.length;
      const flow = el('p', { class: 'tokens' }, ...tokens.map(tokenNode));
      if (source === 0) turns.push(promptCard(flow, ids.length));
      else if (source === 1) turns.push((card = replyCard(flow, record.turns[turn] ?? NO_TURN, turn, tokens)));
      else (card ?? turns.at(-1)).append(el('h3', {}, 'Answer', el('span', {}, `${ids.length} tokens put there by the environment and the template`)), flow);
    }
  });
  if (!record.rows.length && record.turns.length) turns.push(...textCards(record));
  if (!turns.length) turns.push(el('div', { class: 'turn' }, 'No token was recorded.'));
  $('turns').replaceChildren(...turns);
  paint();
  side(null);
}
function textCards(record) {
  const cards = [el('div', { class: 'turn' }, 'No token ids are recorded: record.tokens was false, or a chat endpoint that returns none played this episode. It is shown as text, and cannot be trained on.')];
  const said = (message) => el('div', { class: 'said' }, el('b', {}, message.role), el('pre', {}, message.content));
  const opening = (record.info?.ids_left_out ?? record.info?.chat_endpoint)?.opening ?? [];
  if (opening.length) cards.push(el('details', { class: 'turn', open: '' }, el('summary', {}, 'Prompt', el('span', {}, `${opening.length} messages`)), ...opening.map(said)));
  return [...cards, ...record.turns.map((turn, index) => replyCard(el('pre', {}, turn.message.content), turn, index, []))];
}
function promptCard(flow, count) {
  const card = el('details', { class: 'turn' }, el('summary', {}, 'Prompt', el('span', {}, `${number(count)} tokens`)), flow);
  card.open = count <= 700;
  return card;
}
function replyCard(flow, turn, index, tokens) {
  const total = tokens.reduce((sum, token) => sum + token.logprob, 0), versions = [...new Set(tokens.map((token) => token.version))];
  const head = el('h3', {}, `Turn ${index}`, el('span', {}, 'reward ', el('b', { class: turn.reward > 0 ? 'good' : '' }, number(turn.reward))),
    ...(tokens.length ? [`${tokens.length} tokens`, `mean logprob ${number(total / tokens.length, 3)}`, `policy version ${versions.join(', ')}`] : []).map((fact) => el('span', {}, fact)),
    el('span', { class: turn.finish_reason === 'stop' ? '' : 'bad' }, `finish: ${turn.finish_reason}`), turn.asked ? el('span', {}, 'a summary that the rollout asked for') : null);
  const card = el('div', { class: 'turn reply' }, head, flow);
  if (turn.message.reasoning) card.append(el('div', { class: 'said' }, el('b', {}, 'reasoning'), el('pre', {}, turn.message.reasoning)));
  for (const call of turn.message.tool_calls ?? []) {
    const wrong = 'raw' in call;
    card.append(el('div', { class: wrong ? 'call wrong' : 'call' }, el('b', {}, wrong ? (call.truncated ? 'truncated call' : 'malformed call') : `call ${call.name}`), el('pre', {}, wrong ? `${call.raw}\n${call.error}` : JSON.stringify(call.arguments)), el('span', { class: 'soft' }, `  ${call.id}`)));
  }
  for (const result of turn.tool_results ?? []) {
    card.append(el('div', { class: result.error ? 'call result wrong' : 'call result' }, el('b', {}, `result ${result.name}`), result.error ? el('b', { class: 'bad' }, result.error) : null, el('pre', {}, result.content), el('span', { class: 'soft' }, `  ${result.call_id}`)));
  }
  if (turn.observation && !(turn.tool_results ?? []).length) card.append(el('div', { class: 'said' }, el('b', {}, 'observation'), el('pre', {}, turn.observation)));
  return card;
}
function tokenNode(token) {
  const text = state.data.texts[token.id] ?? `⟨${token.id}⟩`;
  token.text = text;
  token.node = el('span', { class: `t s${token.source}${state.special.has(token.id) ? ' special' : ''}`, 'data-i': state.tokens.length }, text === '' ? '∅' : text);
  state.tokens.push(token);
  return token.node;
}

// ---- colours and the side panel ----------------------------------------------------------------------------
const MODES = ['provenance', 'logprob', 'advantage'];
function drawSwitch() {
  $('colour').append(...MODES.map((mode) => el('button', { type: 'button', role: 'radio', 'data-mode': mode, title: 'c: next', onclick: () => { state.colour = mode; paint(); } }, mode)));
}
function paint() {
  const mode = state.colour, top = Math.max(1e-9, ...state.tokens.map((token) => Math.abs(token.advantage ?? 0)));
  for (const button of $('colour').children) button.setAttribute('aria-checked', String(button.dataset.mode === mode));
  const tint = (colour, share) => `color-mix(in srgb, var(${colour}) ${(100 * share).toFixed(0)}%, transparent)`;
  for (const token of state.tokens) {
    let colour = '';
    if (mode === 'logprob') colour = token.logprob === null ? 'transparent' : tint('--hot', Math.min(1, -token.logprob / 4) * 0.75);
    if (mode === 'advantage') colour = token.advantage === null ? 'transparent' : tint(token.advantage < 0 ? '--bad' : '--good', (Math.abs(token.advantage) / top) * 0.6);
    token.node.style.backgroundColor = colour;
  }
  const swatch = (colour, text, kind = '') => { const box = el('i', { class: kind }); box.style.background = colour; return el('span', {}, box, text); };
  const legends = {
    provenance: [swatch('var(--prompt)', 'PROMPT'), swatch('var(--policy)', 'POLICY, sampled'), swatch('var(--env)', 'ENV'), el('span', {}, '⏎ newline  ▢ special token')],
    logprob: [swatch('linear-gradient(90deg, transparent, var(--hot))', 'logprob 0 … −4, sampled tokens only', 'scale')],
    advantage: [swatch('linear-gradient(90deg, var(--bad), transparent, var(--good))', `advantage −${number(top, 3)} … +${number(top, 3)}`, 'scale')],
  };
  const none = mode === 'advantage' && !state.tokens.some((token) => token.advantage !== null);
  $('legend').replaceChildren(...(none ? [el('span', {}, 'no advantages were recorded for this episode')] : legends[mode]));
}
function side(token) {
  const panel = $('side');
  panel.classList.toggle('idle', !token);
  if (!token) {
    panel.replaceChildren(el('div', { class: 'soft' }, 'Point at a token to see its logprob, advantage and policy version; click keeps it here.'));
    return;
  }
  const facts = [['id', token.id], ['source', SOURCE[token.source]], ['trained', token.source !== 1 ? 'no' : token.excluded ? `no: ${token.excluded}` : 'yes'], ['turn', token.turn < 0 ? 'before the first' : token.turn], ['position', `${token.position}${token.row ? ` in row ${token.row}` : ''}`],
    ['logprob', token.logprob === null ? '–' : String(token.logprob)], ['probability', token.logprob === null ? '–' : `${(100 * Math.exp(token.logprob)).toPrecision(3)} %`], ['advantage', signed(token.advantage)], ['policy version', token.version ?? '–']];
  panel.replaceChildren(el('h3', {}, token.text === '' ? '∅' : token.text), el('dl', {}, ...facts.flatMap(([name, value]) => [el('dt', {}, name), el('dd', {}, value)])));
}
function tokenAt(event) {
  const node = event.target instanceof Element ? event.target.closest('.t') : null;
  return node ? state.tokens[Number(node.dataset.i)] : null;
}
function pin(token) {
  state.pinned?.node.classList.remove('pinned');
  state.pinned = token === state.pinned ? null : token;
  state.pinned?.node.classList.add('pinned');
  side(state.pinned);
}

// ---- keys and start ----------------------------------------------------------------------------------------
function move(by) {
  const open = state.listed.filter((episode) => episode.embedded), at = open.findIndex((episode) => episode.line === state.line);
  const next = open[at < 0 ? 0 : at + by];
  if (next) go(next.line);
}
function listen() {
  const turns = $('turns');
  turns.addEventListener('pointerover', (event) => { if (!state.pinned && event.pointerType === 'mouse') { const token = tokenAt(event); if (token) side(token); } });
  turns.addEventListener('click', (event) => { const token = tokenAt(event); if (token) pin(token); });
  $('previous').addEventListener('click', () => move(-1));
  $('next').addEventListener('click', () => move(1));
  $('theme').addEventListener('click', () => {
    const root = document.documentElement, dark = getComputedStyle(root).colorScheme === 'light dark' ? matchMedia('(prefers-color-scheme: dark)').matches : root.style.colorScheme === 'dark';
    root.style.colorScheme = dark ? 'light' : 'dark';
  });
  document.addEventListener('keydown', (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest?.('input, select')) return;
    if (event.key === 'j') move(1);
    else if (event.key === 'k') move(-1);
    else if (event.key === 'c') { state.colour = MODES[(MODES.indexOf(state.colour) + 1) % MODES.length]; paint(); }
    else if (event.key === 'Escape' && state.pinned) pin(state.pinned);
  });
  window.addEventListener('hashchange', () => fromAddress());
}
function fromAddress() {
  const match = /^#episode=(\d+)$/.exec(location.hash);
  return match ? openEpisode(Number(match[1]), true) : null;
}
async function start() {
  if (typeof DecompressionStream === 'undefined') throw new Error('this browser cannot unpack the data (no DecompressionStream); use one of 2023 or later');
  state.data = await unpack('overview');
  state.special = new Set(state.data.special);
  state.episodes = state.data.episodes.map((row) => Object.fromEntries(COLUMNS.map((name, i) => [name, row[i]])));
  drawFacts();
  drawRepeats();
  drawSigns();
  drawCharts();
  drawFilters();
  drawSwitch();
  list();
  listen();
  const first = state.listed.find((episode) => episode.line === state.data.first) ?? state.listed.find((episode) => episode.embedded);
  await (fromAddress() ?? (first ? openEpisode(first.line) : ($('title').textContent = 'No episodes were recorded')));
  document.body.dataset.ready = 'yes';
}
function complain(error) {
  $('notice').hidden = false;
  $('notice').textContent = `This page could not be drawn: ${error.message}`;
}
start().catch(complain);
