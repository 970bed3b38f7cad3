// ---- episodes side by side: a group, or one task over time ------------------------------------------------------
const MAX_COLUMNS = 8;
const sameTurn = (a, b) => JSON.stringify([a.message, a.results, a.observation]) === JSON.stringify([b.message, b.results, b.observation]);
function sharedTurns(episodes) {
  const shortest = Math.min(...episodes.map((episode) => episode.turns.length));
  let count = 0;
  while (count < shortest && episodes.every((episode) => sameTurn(episode.turns[count], episodes[0].turns[count]))) count += 1;
  return count;
}
// Which rows of a task are beside each other: the evaluations before, during and after training.
function chooseColumns(kind, rows) {
  const shown = kind === 'task' && rows.some((row) => row.phase !== 'train') ? rows.filter((row) => row.phase !== 'train') : rows;
  if (shown.length <= MAX_COLUMNS) return shown;
  return kind === 'group' ? shown.slice(0, MAX_COLUMNS) : [...shown.slice(0, MAX_COLUMNS / 2), ...shown.slice(-MAX_COLUMNS / 2)];
}
function SideBySide({ run, rows }) {
  const [episodes, setEpisodes] = useState(null), [error, setError] = useState(null), [isOpen, setOpen] = useState(false);
  const key = rows.map((row) => row.line).join();
  useEffect(() => {
    let current = true;
    Promise.all(rows.map((row) => api('episode', { run, line: row.line }))).then((all) => current && setEpisodes(all), (problem) => current && setError(problem));
    return () => { current = false; };
  }, [run, key]);
  if (!episodes) return html`<${Waiting} error=${error} />`;
  const shared = episodes.length > 1 ? sharedTurns(episodes) : 0;
  const isSameOpening = episodes.every((episode) => JSON.stringify(episode.opening) === JSON.stringify(episodes[0].opening));
  const turns = { ...episodes[0], turns: episodes[0].turns.slice(0, shared) };
  return html`${isSameOpening && html`<details class="shared" open=${isOpen} onToggle=${(event) => setOpen(event.target.open)}><summary>What all begin with: the opening${shared > 0 && ` and ${plural(shared, 'equal turn')}`}</summary><${Chat} episode=${turns} /></details>`}
    <div class="beside" tabindex="0" role="region" aria-label="episodes side by side">${episodes.map((episode) => html`<article key=${episode.row.line}><header><a href=${address(run, 'episode', episode.row.line)}>episode ${episode.row.line}</a> <${Outcome} row=${episode.row} /> <span>reward ${number(episode.row.reward)}</span>
      <div class="soft">${phaseName(episode.row.phase)}, step ${episode.row.step}, ${plural(episode.row.turns, 'turn')}, ${episode.row.stop}</div></header>
      <${Chat} episode=${episode} from=${shared} hasOpening=${!isSameOpening} />${shared === episode.turns.length && html`<p class="soft">(no further turn)</p>`}</article>`)}</div>`;
}
function RelatedPage({ run, line, kind, version }) {
  const { data, error } = useApi('related', { run, line, kind }, version);
  useKeys({ Escape: () => go(run, 'episode', line) });
  if (!data) return html`<${Waiting} error=${error} />`;
  const rewards = [...new Set(data.rows.map((row) => row.reward))], columns = chooseColumns(kind, data.rows), first = data.rows[0];
  const won = data.rows.filter((row) => row.success).length;
  return html`<h1>${kind === 'group' ? `The group of episode ${line}` : 'One task over time'} <small dir="auto">${first.task}</small></h1>
    <nav class="actions"><a class="button" href=${address(run, 'episode', line)}>← episode ${line} <kbd>Esc</kbd></a></nav>
    ${kind === 'group' && data.number > 1 && html`<p class=${rewards.length === 1 && first.phase === 'train' ? 'note' : ''}>${rewards.length === 1
      ? first.phase === 'train' ? `All ${data.number} got ${number(rewards[0])}: this group has no signal, and nothing was learned from it.` : `All ${data.number} got ${number(rewards[0])}.`
      : `${won} of ${data.number} succeeded; rewards are from ${number(Math.min(...rewards))} to ${number(Math.max(...rewards))}.`}</p>`}
    ${kind === 'task' && html`<${EpisodeTable} run=${run} rows=${data.rows} />`}
    <h2>Side by side ${columns.length < data.number && html`<small>${columns.length} of ${data.number}</small>`}</h2><${SideBySide} run=${run} rows=${columns} />`;
}
