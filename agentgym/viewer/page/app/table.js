// ---- the table of episodes -----------------------------------------------------------------------------------
const COLUMNS = [['line', '#'], ['phase', 'phase'], ['step', 'step'], ['task', 'task'], ['success', 'outcome'], ['reward', 'reward'], ['stop', 'stop reason'], ['tool_error', 'last call error'], ['turns', 'turns'], ['tokens', 'tokens'], ['cause', 'last observation']];
const NUMERIC = new Set(['line', 'step', 'reward', 'turns', 'tokens']);
const PAGE = 100;
let listing = { run: 0, rows: [], params: {} }; // the rows that j and k go through in an episode
function EpisodeTable({ run, rows, sort, descending, onSort, params = {} }) {
  const [chosen, setChosen] = useState(0), body = useRef(null);
  if (onSort) listing = { run, rows: rows.map((row) => row.line), params };
  const choose = (index) => {
    const at = Math.max(0, Math.min(rows.length - 1, index));
    setChosen(at);
    body.current?.children[at]?.querySelector('a').focus();
  };
  const move = (by) => () => choose(body.current?.contains(document.activeElement) ? chosen + by : chosen);
  useKeys({ j: move(1), k: move(-1) });
  const head = (name, title) => {
    const state = sort === name ? (descending ? 'descending' : 'ascending') : 'none';
    const arrow = { none: '', ascending: ' ↑', descending: ' ↓' }[state];
    return html`<th scope="col" class=${NUMERIC.has(name) ? 'n' : ''} aria-sort=${onSort ? state : undefined}>${onSort ? html`<button onClick=${() => onSort(name)}>${title}${arrow}</button>` : title}</th>`;
  };
  const cell = (row, name) => ({
    success: () => html`<${Outcome} row=${row} />`, reward: () => number(row.reward),
    line: () => html`<a href=${address(run, 'episode', row.line)} onFocus=${() => setChosen(rows.indexOf(row))}>${row.line}</a>`,
    tool_error: () => row.tool_error && html`<span class="bad">${row.tool_error}</span>`,
  })[name]?.() ?? (typeof row[name] === 'number' ? number(row[name]) : row[name]);
  return html`<${Table}>
    <thead><tr>${COLUMNS.map(([name, title]) => head(name, title))}</tr></thead>
    <tbody ref=${body}>${rows.map((row, i) => html`<tr key=${row.line} class=${i === chosen ? 'chosen' : ''} onClick=${(event) => event.target.closest('a') || go(run, 'episode', row.line)}>
      ${COLUMNS.map(([name]) => html`<td class=${NUMERIC.has(name) ? 'n' : 'wide'} title=${name === 'cause' || name === 'task' ? row[name] : undefined} dir="auto">${cell(row, name)}</td>`)}</tr>`)}</tbody><//>`;
}
const VIEW = ['sort', 'descending', 'page'];
const filterOf = (params) => Object.fromEntries(Object.entries(params).filter(([name]) => !VIEW.includes(name)));
function Choice({ label, name, values, filter, set, extra = [] }) {
  return html`<label>${label}<select value=${filter[name] ?? ''} onChange=${(event) => set({ [name]: event.target.value })}>
    <option value="">any</option>${extra}${values.map(([value, count]) => html`<option value=${value}>${value} (${number(count)})</option>`)}</select></label>`;
}
const numberOrNull = (text) => (text === '' ? null : Number(text));
// An input that keeps what is typed while its page is drawn again, and sends it `delay` ms later, or when it is left.
function Typed({ value, send, delay, input, ...rest }) {
  const outside = String(value ?? ''), [text, setText] = useState(outside), sent = useRef(outside), timer = useRef(0);
  useEffect(() => { if (outside !== sent.current) setText(sent.current = outside); }, [outside]);
  useEffect(() => () => clearTimeout(timer.current), []);
  const latest = useRef(send);
  latest.current = send; // other filters may change meanwhile
  const commit = (typed) => latest.current(sent.current = typed);
  const typing = (event) => {
    const typed = event.target.value;
    setText(typed);
    clearTimeout(timer.current);
    if (delay) timer.current = setTimeout(() => commit(typed), delay);
  };
  return html`<input ref=${input} value=${text} onInput=${typing} onChange=${(event) => delay || commit(event.target.value)} ...${rest} />`;
}
function Range({ label, low, high, filter, set }) {
  const input = (name, hint) => html`<${Typed} key=${name} type="number" step="any" aria-label=${`${label}, ${hint}`} placeholder=${hint} value=${filter[name]} send=${(text) => set({ [name]: numberOrNull(text) })} />`;
  return html`<fieldset><legend>${label}</legend>${input(low, 'from')}${input(high, 'to')}</fieldset>`;
}
const NO_VALUES = { phase: [], env: [], status: [], stop: [], tool: [], error: [], metrics: [] };
function EpisodesPage({ run, params, version }) {
  const filter = filterOf(params), sort = params.sort ?? 'line', descending = params.descending ?? false, page = params.page ?? 0;
  const search = useRef(null);
  const set = (changes) => go(run, 'episodes', null, { ...params, page: null, ...changes });
  const { data, error, isStale } = useApi('episodes', { run, filter, sort, descending, offset: page * PAGE, limit: PAGE }, version);
  useKeys({ '/': () => search.current.focus(), ']': () => data && (page + 1) * PAGE < data.number && set({ page: page + 1 }), '[': () => page > 0 && set({ page: page - 1 }) });
  const values = useApi('values', { run }, version).data ?? NO_VALUES;
  const last = data ? Math.max(0, Math.ceil(data.number / PAGE) - 1) : 0;
  const sortBy = (name) => set({ sort: name, descending: sort === name ? !descending : null });
  const clear = Object.keys(filter).length > 0;
  return html`<h1>Episodes <small role="status" aria-live="polite">${data && plural(data.number, 'episode')}${isStale && data ? ' …' : ''}</small></h1>
    <form class="filters" role="search" onSubmit=${(event) => { event.preventDefault(); set({ contains: search.current.value }); }}>
      <label class="search">search observations, replies, calls <kbd>/</kbd><${Typed} type="search" input=${search} value=${filter.contains} placeholder=${'words, or "words in order"'} delay=${250} send=${(text) => set({ contains: text })} /></label>
      <${Choice} label="phase" name="phase" values=${values.phase} filter=${filter} set=${set} />
      <label>outcome<select value=${filter.failed === undefined ? '' : String(filter.failed)} onChange=${(event) => set({ failed: event.target.value || null })}><option value="">any</option><option value="true">failed</option><option value="false">success</option></select></label>
      <${Choice} label="stop reason" name="stop" values=${values.stop} filter=${filter} set=${set} />
      <${Choice} label="tool called" name="tool" values=${values.tool} filter=${filter} set=${set} />
      <${Choice} label="call error" name="error" values=${values.error} filter=${filter} set=${set} extra=${html`<option value="any">any error</option>`} />
      ${values.env.length > 1 && html`<${Choice} label="environment" name="env" values=${values.env} filter=${filter} set=${set} />`}
      ${values.status.length > 1 && html`<${Choice} label="status" name="status" values=${values.status} filter=${filter} set=${set} />`}
      <${Range} label="step" low="first_step" high="last_step" filter=${filter} set=${set} />
      <details class="rare" open=${['min_reward', 'max_reward', 'min_turns', 'max_turns', 'min_tokens', 'max_tokens', 'metric', 'task', 'seed'].some((name) => name in filter)}><summary>more filters</summary><div>
      <${Range} label="reward" low="min_reward" high="max_reward" filter=${filter} set=${set} />
      <${Range} label="turns" low="min_turns" high="max_turns" filter=${filter} set=${set} />
      <${Range} label="tokens" low="min_tokens" high="max_tokens" filter=${filter} set=${set} />
      <label>task contains<${Typed} value=${filter.task} send=${(text) => set({ task: text })} /></label>
      <label>seed<${Typed} type="number" value=${filter.seed} send=${(text) => set({ seed: numberOrNull(text) })} /></label>
      <label>metric<select value=${filter.metric ?? ''} onChange=${(event) => set({ metric: event.target.value, min_metric: null, max_metric: null })}><option value="">none</option>${values.metrics.map((name) => html`<option>${name}</option>`)}</select></label>
      ${filter.metric && html`<${Range} label=${filter.metric} low="min_metric" high="max_metric" filter=${filter} set=${set} />`}</div></details>
      ${clear && html`<button type="button" onClick=${() => go(run, 'episodes')}>clear all</button>`}
    </form>
    ${(filter.cause !== undefined || filter.last_error !== undefined) && html`<p class="chips">last observation or error: <b dir="auto">${filter.cause ?? (filter.last_error || 'no failed call')}</b> <button onClick=${() => set({ cause: null, last_error: null })}>remove</button></p>`}
    ${data ? html`<${EpisodeTable} run=${run} rows=${data.rows} sort=${sort} descending=${descending} onSort=${sortBy} params=${params} />
      ${data.number === 0 && html`<p>No episode fits these filters.</p>`}
      ${last > 0 && html`<nav class="pages" aria-label="pages"><button disabled=${page === 0} onClick=${() => set({ page: page - 1 })}>← <kbd>[</kbd></button> page ${page + 1} of ${last + 1} <button disabled=${page >= last} onClick=${() => set({ page: page + 1 })}><kbd>]</kbd> →</button></nav>`}`
      : html`<${Waiting} error=${error} />`}`;
}
