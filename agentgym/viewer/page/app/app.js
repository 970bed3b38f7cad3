// ---- the frame: runs, pages, keys, and what is new in a run that goes on ----------------------------------------
const POLL_MS = 2000;
const KEYS = [['o', 'overview of the run'], ['e', 'episodes'], ['s', 'settings'], ['r', 'runs beside each other'], ['n', 'next run'], ['f', 'overview: the first group of failures'], ['/', 'search'], ['j k', 'next, previous row or episode'], ['Enter', 'open'], ['[ ]', 'previous, next page of the table'], ['t', 'episode: conversation or tokens'], ['← →', 'tokens: previous, next token'], ['c', 'tokens: colour by source, logprob, advantage, version'], ['g', 'episode: its group side by side'], ['h', 'episode: its task over time'], ['Esc', 'back'], ['d', 'dark or light'], ['?', 'these keys']];
function useRuns() {
  const [value, setValue] = useState({ runs: null, error: null });
  useEffect(() => {
    let timer = 0;
    const look = async () => {
      try {
        const { runs } = await api('state');
        setValue((before) => (JSON.stringify(before.runs) === JSON.stringify(runs) ? before : { runs, error: null }));
      } catch (error) { setValue((before) => ({ ...before, error })); }
      timer = setTimeout(look, document.hidden ? 5 * POLL_MS : POLL_MS);
    };
    look();
    return () => clearTimeout(timer);
  }, []);
  return value;
}
function useTheme() {
  const system = matchMedia('(prefers-color-scheme: dark)').matches ? 'dark' : 'light';
  const [theme, setTheme] = useState(localStorage.getItem('agentgym-theme') ?? system);
  useEffect(() => { document.documentElement.style.colorScheme = theme; }, [theme]);
  const change = () => { const next = theme === 'dark' ? 'light' : 'dark'; localStorage.setItem('agentgym-theme', next); document.documentElement.style.colorScheme = next; setTheme(next); };
  return [theme, change];
}
function Help({ close }) {
  const dialog = useRef(null);
  useEffect(() => dialog.current.showModal(), []);
  return html`<dialog ref=${dialog} onClose=${close} aria-label="keys"><h2>Keys</h2><dl>${KEYS.map(([key, text]) => html`<dt><kbd>${key}</kbd></dt><dd>${text}</dd>`)}</dl><form method="dialog"><button autofocus>Close</button></form></dialog>`;
}
function Progress({ state }) {
  const share = state.num_bytes ? state.num_indexed_bytes / state.num_bytes : 1;
  if (share >= 1) return state.is_live ? html`<span class="live" role="status">● live</span>` : null;
  return html`<span class="live" role="status">indexing: ${percent(share)}, ${plural(state.num_episodes, 'episode')} <progress value=${share}></progress></span>`;
}
function App() {
  const { runs, error } = useRuns(), at = useAddress(), [theme, changeTheme] = useTheme(), [isHelp, setHelp] = useState(false);
  const run = runs && at.run < runs.length ? at.run : 0, state = runs?.[run];
  const version = state?.version ?? '', all = runs?.map((each) => each.version).join() ?? '';
  const { data: overview, error: problem, isStale } = useApi('overview', { run }, version);
  const many = (runs?.length ?? 0) > 1;
  useKeys({ o: () => go(run, 'overview'), e: () => go(run, 'episodes'), s: () => go(run, 'settings'), r: () => many && go(run, 'compare'), n: () => many && go((run + 1) % runs.length, 'overview'), d: changeTheme, '?': () => setHelp(true) });
  useEffect(() => { if (state) document.title = `${at.page === 'compare' ? 'runs' : state.name} · agentgym`; }, [state?.name, at.page]);
  useEffect(() => { if (many && !location.hash) go(0, 'compare'); }, [many]);
  if (!state) return html`<main><${Waiting} error=${error} /></main>`;
  const link = (page, title, key) => html`<a href=${address(run, page)} aria-current=${at.page === page ? 'page' : undefined}>${title} <kbd>${key}</kbd></a>`;
  const common = { run, version, theme, state };
  const page = () => {
    if (at.page === 'compare') return html`<${ComparePage} version=${all} theme=${theme} />`;
    if (at.page === 'settings') return html`<${SettingsPage} ...${common} />`;
    if (!overview || isStale) return html`<${Waiting} error=${problem} />`;
    if (at.page === 'episodes') return html`<${EpisodesPage} ...${common} params=${at.params} />`;
    if (at.page === 'episode' && at.line) return html`<${EpisodePage} ...${common} line=${at.line} params=${at.params} />`;
    if ((at.page === 'group' || at.page === 'task') && at.line) return html`<${RelatedPage} key=${at.line + at.page} ...${common} line=${at.line} kind=${at.page} />`;
    return html`<${OverviewPage} ...${common} overview=${overview} />`;
  };
  return html`<a class="skip" href="#main" onClick=${(event) => { event.preventDefault(); document.getElementById('main').focus(); }}>to the content</a>
    <header class="top"><div class="brand"><b>agentgym</b> ${many ? html`<label class="hidden" for="run">run</label><select id="run" value=${run} onChange=${(event) => go(Number(event.target.value), 'overview')}>${runs.map((each, i) => html`<option value=${i}>${each.name}</option>`)}</select>` : html`<span class="soft" title=${state.path}>${state.name}</span>`} <${Progress} state=${state} /></div>
      <nav aria-label="pages">${many && link('compare', 'Runs', 'r')}${link('overview', 'Overview', 'o')}${link('episodes', 'Episodes', 'e')}${link('settings', 'Settings', 's')}
      <button onClick=${changeTheme} aria-label="dark or light" title="dark or light (d)">◐</button><button onClick=${() => setHelp(true)} aria-label="keys" title="keys (?)">?</button></nav></header>
    <main id="main" tabindex="-1">${error && html`<p class="note bad" role="alert">${error.message}</p>`}${state.fault && html`<p class="note">${state.fault}. ${'`agentgym verify`'} names what is wrong with the file.</p>`}${overview?.fault && html`<p class="note">${overview.fault}</p>`}${page()}</main>
    ${isHelp && html`<${Help} close=${() => setHelp(false)} />`}`;
}
render(html`<${App} />`, document.getElementById('app'));
document.body.dataset.ready = 'yes';
