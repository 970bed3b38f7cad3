'use strict';
// Everything shown comes from runs and is untrusted: it reaches the page as text nodes only.
const { h, render, Component, Fragment } = preact;
const { useEffect, useMemo, useRef, useState } = preactHooks;
const html = htm.bind(h);
const TOKEN_KEY = 'agentgym-token';
const token = JSON.parse(document.getElementById('token').textContent);
localStorage.setItem(TOKEN_KEY, token);
if (location.search) history.replaceState(null, '', `/${location.hash}`);

async function api(name, body = {}) {
  let response;
  try {
    response = await fetch(`/${name}`, { method: 'POST', headers: { Authorization: `Bearer ${token}`, 'Content-Type': 'application/json' }, body: JSON.stringify(body) });
  } catch {
    throw new Error('the viewer\'s server does not answer: start `agentgym view` again');
  }
  if (response.status === 401) throw new Error('the token is that of another server: open the address that `agentgym view` printed');
  const value = await response.json();
  if (!response.ok) throw new Error(value.error?.message ?? `the server answered ${response.status}`);
  return value;
}
// The answer of the server, asked again when what is asked or `version` changes; the one before is kept meanwhile.
function useApi(name, body, version = '') {
  const [answer, setAnswer] = useState({ data: null, error: null, key: null });
  const key = JSON.stringify([name, body]);
  useEffect(() => {
    let current = true;
    api(name, body).then((data) => current && setAnswer({ data, error: null, key }), (error) => current && setAnswer({ data: null, error, key }));
    return () => { current = false; };
  }, [key, version]);
  return { ...answer, isStale: answer.key !== key };
}
const Waiting = ({ error }) => (error ? html`<p class="note bad" role="alert">${error.message}</p>` : html`<p class="soft" role="status">Loading …</p>`);

function number(value, digits = 4) {
  if (value === null || value === undefined) return '–';
  if (value === 0 || Number.isInteger(value)) return value.toLocaleString('en');
  const size = Math.abs(value);
  return size >= 1000 ? value.toLocaleString('en', { maximumFractionDigits: 0 }) : size < 1e-3 ? value.toExponential(1) : String(Number(value.toPrecision(digits)));
}
const signed = (value, digits) => (value === null || value === undefined ? '–' : (value > 0 ? '+' : '') + number(value, digits));
const percent = (value) => (value === null || value === undefined ? '–' : `${(100 * value).toFixed(1).replace(/\.0$/, '')}%`);
const interval = (ends, show = number) => (ends ? `[${show(ends[0], 3)}, ${show(ends[1], 3)}]` : '');
const phaseName = (phase) => ({ eval_before: 'before training', eval_after: 'after training', eval_during: 'during training', eval: 'evaluation', train: 'training' })[phase] ?? phase;
const outcome = (row) => (row.success === null ? (row.reward === null ? 'no reward' : '–') : row.success ? 'success' : 'failed');
const Outcome = ({ row }) => html`<span class=${row.success ? 'good' : 'bad'}>${row.success ? '✓' : '✗'} ${outcome(row)}</span>`;
const plural = (count, noun) => `${number(count)} ${noun}${count === 1 ? '' : 's'}`;

// ---- addresses: #/RUN/PAGE/LINE?filters ----------------------------------------------------------------------
const NUMBERS = new Set(['first_step', 'last_step', 'seed', 'min_reward', 'max_reward', 'min_turns', 'max_turns', 'min_tokens', 'max_tokens', 'min_metric', 'max_metric', 'page']);
function readAddress() {
  const [path, query = ''] = location.hash.slice(2).split('?');
  const [run = '0', page = 'overview', line] = path.split('/');
  const params = {};
  for (const [name, value] of new URLSearchParams(query)) {
    params[name] = name === 'failed' || name === 'descending' ? value === 'true' : NUMBERS.has(name) ? Number(value) : value;
  }
  return run === 'compare' ? { run: 0, page: 'compare', params } : { run: Number(run) || 0, page: page || 'overview', line: Number(line) || null, params };
}
function address(run, page, line = null, params = {}) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(params)) if (value !== null && value !== undefined && (value !== '' || name === 'last_error' || name === 'cause')) query.set(name, value);
  const text = query.toString();
  return (page === 'compare' ? '#/compare' : `#/${run}/${page}${line === null ? '' : `/${line}`}`) + (text ? `?${text}` : '');
}
const go = (...parts) => { location.hash = address(...parts).slice(1); };
function useAddress() {
  const [value, setValue] = useState(readAddress());
  useEffect(() => {
    let page = location.hash.split('?')[0];
    const changed = () => {
      setValue(readAddress());
      if (page !== (page = location.hash.split('?')[0])) scrollTo(0, 0);
    };
    addEventListener('hashchange', changed);
    return () => removeEventListener('hashchange', changed);
  }, []);
  return value;
}
// ---- keys ------------------------------------------------------------------------------------------------------
const isTyping = (event) => event.ctrlKey || event.metaKey || event.altKey || event.target.closest?.('input, select, textarea');
function useKeys(keys) {
  const latest = useRef(keys);
  latest.current = keys;
  useEffect(() => {
    const pressed = (event) => {
      const action = !isTyping(event) && latest.current[event.key];
      if (action && action(event) !== false) event.preventDefault();
    };
    addEventListener('keydown', pressed);
    return () => removeEventListener('keydown', pressed);
  }, []);
}
// A long text is shown in part until it is asked for; words that were searched are marked.
const SHOWN_TEXT = 4000;
function Text({ text, words }) {
  const [isWhole, setWhole] = useState(false);
  const shown = isWhole || text.length <= SHOWN_TEXT ? text : text.slice(0, SHOWN_TEXT / 2);
  return html`<div class="text" dir="auto">${words ? marked(shown, words) : shown}${shown.length < text.length && html`<button class="more" onClick=${() => setWhole(true)}>… all ${number(text.length)} characters</button>`}</div>`;
}
function searchWords(text) {
  const words = [...(text ?? '').matchAll(/"([^"]+)"?|([^\s"]+)/g)].map((match) => (match[1] ?? match[2]).replace(/[.*+?^${}()|[\]\\]/g, '\\$&'));
  return words.length ? new RegExp(`(${words.join('|')})`, 'gi') : null;
}
const marked = (text, words) => text.split(words).map((part, i) => (i % 2 ? html`<mark>${part}</mark>` : part));
// A table; each cell has the title of its column, which narrow windows show beside it in place of a head.
function Table({ children, name }) {
  const table = useRef(null);
  useEffect(() => {
    const titles = [...table.current.tHead.rows[0].cells].map((cell) => cell.textContent.replace(/ [↑↓]$/, ''));
    for (const row of table.current.tBodies[0].rows) [...row.cells].forEach((cell, i) => { cell.dataset.title = titles[i]; });
  });
  return html`<div class="table"><table ref=${table} aria-label=${name} class=${name}>${children}</table></div>`;
}
