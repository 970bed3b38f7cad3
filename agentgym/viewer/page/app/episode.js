// ---- one episode: its conversation, or its tokens ---------------------------------------------------------------
const SOURCE = ['PROMPT', 'POLICY', 'ENV'];
const MODES = ['source', 'logprob', 'advantage', 'version'];
const SHOWN_TOKENS = 20000;
const callText = (call) => `${call.name}(${Object.entries(call.arguments).map(([name, value]) => `${name}=${JSON.stringify(value)}`).join(', ')})`;
const Call = ({ call, words }) => ('raw' in call
  ? html`<div class="call wrong"><b class="bad">${call.truncated ? 'truncated call' : 'malformed call'}</b> <${Text} text=${call.raw} words=${words} /><span class="bad">${call.error}</span></div>`
  : html`<div class="call"><code>${words ? marked(callText(call), words) : callText(call)}</code></div>`);
function MessageView({ message, words, label }) {
  return html`<div class=${`message ${message.role}`}><div class="role">${label ?? message.role}</div><div class="said">
    ${message.reasoning && html`<details class="reasoning" open=${message.reasoning.length < 600}><summary>reasoning</summary><${Text} text=${message.reasoning} words=${words} /></details>`}
    ${message.content && html`<${Text} text=${message.content} words=${words} />`}${(message.calls ?? []).map((call) => html`<${Call} call=${call} words=${words} />`)}
    ${!message.content && !message.reasoning && !(message.calls ?? []).length && html`<span class="soft">(empty)</span>`}</div></div>`;
}
function TurnView({ turn, index, words }) {
  const shown = new Set(turn.results.map((result) => result.content)), label = html`assistant <small>turn ${index}</small>`;
  const isCut = turn.finish && turn.finish !== 'stop' && turn.finish !== 'tool_calls';
  return html`<${MessageView} message=${turn.message} words=${words} label=${label} />
    ${(isCut || turn.asked) && html`<p class="aside">${isCut && html`<span class="bad">the reply ended by: ${turn.finish}</span>`} ${turn.asked && 'the rollout asked for this summary'}</p>`}
    ${turn.results.map((result) => html`<div class=${`message tool ${result.error ? 'wrong' : ''}`}><div class="role">${result.name || 'tool'}${result.error && html` <b class="bad">${result.error}</b>`}</div><div class="said"><${Text} text=${result.content} words=${words} /></div></div>`)}
    ${turn.observation && !shown.has(turn.observation) && html`<div class="message user"><div class="role">environment</div><div class="said"><${Text} text=${turn.observation} words=${words} /></div></div>`}
    ${turn.reward !== 0 && turn.reward !== null && html`<p class="aside">reward <b class=${turn.reward > 0 ? 'good' : 'bad'}>${signed(turn.reward)}</b></p>`}`;
}
function branchHead(branches, turn) {
  const row = branches.findIndex((branch) => branch.num_turns && branch.first_turn === turn);
  return row > 0 ? html`<p class="aside">row ${row}: ${branches[row].label || 'main'}</p>` : null;
}
const Chat = ({ episode, words, from = 0, hasOpening = true }) => html`<div class="chat">${hasOpening && episode.opening.map((message) => html`<${MessageView} message=${message} words=${words} />`)}
  ${episode.turns.slice(from).map((turn, i) => html`${branchHead(episode.branches, from + i)}<${TurnView} turn=${turn} index=${from + i} words=${words} />`)}</div>`;

function listTokens(episode) {
  const special = new Set(episode.special), tokens = [];
  let turn = -1;
  episode.rows.forEach((spans, row) => {
    let position = 0, sampled = 0;
    for (const [source, ids, logprobs, versions, excluded] of spans) {
      if (source === 1) turn += 1;
      ids.forEach((id, i) => tokens.push({ id, source, row, turn, position: position + i, starts: i === 0, isSpecial: special.has(id), text: episode.texts[id] || '∅', logprob: logprobs?.[i] ?? null, version: versions?.[i] ?? null, excluded, advantage: source === 1 ? episode.advantages?.[row]?.[sampled + i] ?? null : null }));
      position += ids.length;
      if (source === 1) sampled += ids.length;
    }
  });
  return tokens;
}
const mix = (colour, share) => `color-mix(in srgb, var(${colour}) ${(100 * share).toFixed(0)}%, transparent)`;
function tint(token, mode, top) {
  if (mode === 'source') return undefined;
  const value = token[mode];
  if (value === null) return 'transparent';
  if (mode === 'logprob') return mix('--hot', Math.min(1, -value / 4) * 0.75);
  if (mode === 'advantage') return top ? mix(value < 0 ? '--bad' : '--good', (Math.abs(value) / top) * 0.6) : 'transparent';
  return mix(COLOURS[value % COLOURS.length], 0.35);
}
class TokenFlow extends Component {
  shouldComponentUpdate(next) { return next.tokens !== this.props.tokens || next.mode !== this.props.mode || next.limit !== this.props.limit; }
  render({ tokens, mode, limit, top }) {
    const spans = [];
    tokens.slice(0, limit).forEach((token, i) => {
      if (token.starts) spans.push({ token, items: [] });
      spans.at(-1).items.push(html`<span class=${`t s${token.source}${token.isSpecial ? ' special' : ''}`} data-i=${i} style=${{ backgroundColor: tint(token, mode, top) }}>${token.text}</span>`);
    });
    return html`<div class="spans">${spans.map(({ token, items }) => html`<div class=${`span s${token.source}`}><div class="role">${SOURCE[token.source]}${token.source === 1 ? ` turn ${token.turn}` : ''} <small>${plural(items.length, 'token')}${token.row ? `, row ${token.row}` : ''}</small></div><p class="tokens">${items}</p></div>`)}</div>`;
  }
}
function TokenFacts({ token }) {
  if (!token) return html`<aside class="side soft">Point at a token, or use the arrow keys ← →, to see its logprob, advantage and policy version.</aside>`;
  const facts = [['id', token.id], ['source', SOURCE[token.source]], ['trained', token.source !== 1 ? 'no' : token.excluded ? `no: ${token.excluded}` : 'yes'], ['turn', token.turn < 0 ? 'before the first' : token.turn], ['position', token.position], ['logprob', token.logprob ?? '–'], ['probability', token.logprob === null ? '–' : `${(100 * Math.exp(token.logprob)).toPrecision(3)}%`], ['advantage', signed(token.advantage)], ['policy version', token.version ?? '–']];
  return html`<aside class="side" aria-live="polite"><h3 dir="auto">${token.text}</h3><dl>${facts.map(([name, value]) => html`<dt>${name}</dt><dd>${value}</dd>`)}</dl></aside>`;
}
function Tokens({ episode, mode, setMode }) {
  const [chosen, setChosen] = useState(null), [limit, setLimit] = useState(SHOWN_TOKENS), flow = useRef(null);
  const tokens = useMemo(() => (episode.rows ? listTokens(episode) : []), [episode]);
  const top = useMemo(() => Math.max(0, ...tokens.map((token) => Math.abs(token.advantage ?? 0))), [tokens]);
  const choose = (index) => {
    flow.current?.querySelector('.t.pinned')?.classList.remove('pinned');
    const node = flow.current?.querySelector(`[data-i="${index}"]`);
    node?.classList.add('pinned');
    node?.scrollIntoView({ block: 'nearest' });
    setChosen(index);
  };
  const step = (by) => () => choose(Math.max(0, Math.min(tokens.length - 1, chosen === null ? 0 : chosen + by)));
  useKeys({ ArrowRight: step(1), ArrowLeft: step(-1), c: () => setMode(MODES[(MODES.indexOf(mode) + 1) % MODES.length]) });
  const at = (event) => event.target.dataset?.i;
  if (episode.tokens_left_out) return html`<p class="note">${number(episode.num_tokens)} tokens are more than this page shows: ${'`agentgym episodes`'} prints them.</p>`;
  if (!tokens.length) return html`<p class="note">No token ids are recorded: record.tokens was false, or a chat endpoint that returns none played this episode. It cannot be trained on.</p>`;
  const trained = tokens.some((token) => token.advantage !== null);
  const legend = { source: ['PROMPT and ENV are read, POLICY is sampled'], logprob: ['logprob 0 … −4 of sampled tokens'], advantage: [!trained ? 'no advantages are recorded for this episode' : top ? `advantage −${number(top, 3)} … +${number(top, 3)}` : 'every advantage is 0: nothing is learned from this episode'], version: ['the policy version that sampled a token'] }[mode];
  return html`<div class="switch" role="group" aria-label="colour by"><span class="soft">colour <kbd>c</kbd></span>${MODES.map((each) => html`<button aria-pressed=${mode === each} onClick=${() => setMode(each)}>${each}</button>`)}<span class="soft">${legend}</span></div>
    ${episode.token_reason && html`<p class="soft">${episode.token_reason}: tokens are shown as numbers</p>`}
    <div class="columns"><div ref=${flow} onMouseOver=${(event) => at(event) && setChosen(Number(at(event)))} onClick=${(event) => at(event) && choose(Number(at(event)))}><${TokenFlow} tokens=${tokens} mode=${mode} limit=${limit} top=${top} />
      ${limit < tokens.length && html`<button onClick=${() => setLimit(Infinity)}>all ${number(tokens.length)} tokens</button>`}</div><${TokenFacts} token=${tokens[chosen] ?? null} /></div>`;
}
function signal(rows) {
  const rewards = [...new Set(rows.map((row) => row.reward))];
  if (rows.length < 2 || rows[0].phase !== 'train') return null;
  return rewards.length === 1 ? `all ${rows.length} of its group got ${number(rewards[0])}: there is nothing to learn from it` : `its group of ${rows.length} got ${number(Math.min(...rewards))} to ${number(Math.max(...rewards))}`;
}
const BRANCH_HEAD = ['row', 'branch', 'begins at', 'turns', 'tokens', 'sampled', 'trained', 'excluded', 'asked by'];
const COUNTS = new Set(['tokens', 'sampled', 'trained']);
const reasons = (excluded) => Object.entries(excluded).map(([reason, count]) => `${number(count)} ${reason}`).join(', ');
const turnsOf = ({ first_turn: first, num_turns: count }) => (count > 1 ? `${first}–${first + count - 1}` : count ? first : '–');
const Branches = ({ branches }) => html`<${Table} name="branches"><thead><tr>${BRANCH_HEAD.map((name) => html`<th class=${COUNTS.has(name) ? 'n' : ''}>${name}</th>`)}</tr></thead>
  <tbody>${branches.map((branch, row) => html`<tr><td>${row}</td><td>${branch.label || 'main'}</td><td>${branch.start || '–'}</td><td>${turnsOf(branch)}</td>
    <td class="n">${number(branch.num_tokens)}</td><td class="n">${number(branch.num_sampled)}</td><td class="n">${number(branch.num_trained)}</td><td>${reasons(branch.excluded) || '–'}</td><td dir="auto">${branch.client || '–'}</td></tr>`)}</tbody><//>`;
let colourMode = 'source';
function EpisodePage({ run, line, params, version }) {
  const { data, error, isStale } = useApi('episode', { run, line }, '');
  const [mode, setMode] = useState(colourMode), isTokens = params.view === 'tokens';
  colourMode = mode;
  const rows = listing.run === run ? listing.rows : [], at = rows.indexOf(line), words = searchWords(listing.params.contains);
  const move = (by) => () => (at >= 0 && rows[at + by] !== undefined ? go(run, 'episode', rows[at + by], params) : false);
  const back = () => go(run, 'episodes', null, listing.run === run ? listing.params : {});
  useKeys({ j: move(1), k: move(-1), t: () => go(run, 'episode', line, { view: isTokens ? null : 'tokens' }), g: () => go(run, 'group', line), h: () => go(run, 'task', line), Escape: back });
  if (!data || isStale) return html`<${Waiting} error=${error} />`;
  const { row } = data, note = signal(data.group);
  const extras = { task: data.task, metrics: data.metrics, info: data.info };
  return html`<h1>Episode ${row.line} <${Outcome} row=${row} /> <small>${row.reward !== null && `reward ${number(row.reward)}`}</small></h1>
    <nav class="actions" aria-label="episode"><button onClick=${back}>← list <kbd>Esc</kbd></button>
      <button disabled=${at < 1} onClick=${move(-1)}>previous <kbd>k</kbd></button><button disabled=${at < 0 || at + 1 >= rows.length} onClick=${move(1)}>next <kbd>j</kbd></button>
      <button aria-pressed=${isTokens} onClick=${() => go(run, 'episode', line, { view: isTokens ? null : 'tokens' })}>tokens <kbd>t</kbd></button>
      ${data.group.length > 1 && html`<a class="button" href=${address(run, 'group', line)}>group of ${data.group.length} <kbd>g</kbd></a>`}
      <a class="button" href=${address(run, 'task', line)}>this task over time <kbd>h</kbd></a></nav>
    <p class="facts small"><span dir="auto">${row.task}</span><span>${phaseName(row.phase)}, step <b>${row.step}</b></span><span>${row.status}, stopped by <b>${row.stop}</b></span><span><b>${row.turns}</b> turns</span><span><b>${number(row.tokens)}</b> tokens, ${number(row.sampled)} sampled</span>
      ${note && html`<span>${note}</span>`}</p>
    ${data.error && html`<p class="note" dir="auto"><b class="bad">error</b> ${data.error}</p>`}
    ${data.branches.length > 0 && html`<${Branches} branches=${data.branches} />`}
    ${isTokens ? html`<${Tokens} key=${line} episode=${data} mode=${mode} setMode=${setMode} />` : html`<${Chat} key=${line} episode=${data} words=${words} />`}
    <details class="raw"><summary>task, metrics and info</summary><pre dir="auto">${JSON.stringify(extras, null, 2)}</pre></details>`;
}
