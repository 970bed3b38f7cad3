// ---- the first view of a run: how well it does, and why it fails -----------------------------------------------
const WAYS = [['observation', 'last observation'], ['error', 'call error'], ['stop', 'stop reason']];
function Headline({ evaluations, curves, state }) {
  const scored = evaluations.filter((each) => each.success !== null && each.phase.startsWith('eval'));
  const first = scored[0], last = scored.at(-1);
  const fact = (value, label) => html`<div class="fact"><b>${value}</b><span>${label}</span></div>`;
  const steps = curves.steps.length ? fact(number(curves.steps.at(-1)), 'last step') : null;
  return html`<div class="facts">${last && html`<div class="fact main">
      <b>${first !== last && html`${percent(first.success)} <span class="arrow">→</span> `}${percent(last.success)}</b>
      <span>held-out success${first !== last ? ', before → after' : ''}, ${interval(last.success_interval, percent)} of ${plural(last.num_episodes, 'episode')}</span></div>`}
    ${last && fact(number(last.reward_mean, 3), 'mean reward')}${steps}${fact(number(state.num_episodes), 'episodes')}
    ${evaluations.some((each) => each.num_failed) && html`<div class="fact"><b class="bad">${number(evaluations.reduce((sum, each) => sum + each.num_failed, 0))}</b><span>episodes without a reward</span></div>`}</div>`;
}
function Failures({ run, last, version }) {
  const [by, setBy] = useState('observation'), list = useRef(null);
  const filter = { phase: last.phase, first_step: last.step, last_step: last.step };
  const { data, error } = useApi('failures', { run, filter, by }, version);
  const failed = { ...filter, failed: true };
  const most = Math.max(1, ...(data?.groups ?? []).map((group) => group.number));
  useKeys({ f: () => list.current?.querySelector('a')?.focus() });
  return html`<section aria-labelledby="why"><h2 id="why">Why do they fail? <small>${number(last.num_failed)} of ${plural(last.num_episodes, 'episode')} ${phaseName(last.phase)}${last.phase === 'eval' ? '' : `, step ${last.step}`}</small> <kbd>f</kbd></h2>
    ${last.num_failed === 0 ? html`<p class="good">None failed.</p>` : html`
    <div class="switch" role="group" aria-label="group failures by">${WAYS.map(([way, name]) => html`<button aria-pressed=${by === way} onClick=${() => setBy(way)}>${name}</button>`)}
      <a class="all" href=${address(run, 'episodes', null, failed)}>all ${number(last.num_failed)} failures</a></div>
    ${data ? html`<ol class="causes" ref=${list}>${data.groups.map((group) => html`<li key=${group.line}><a href=${address(run, 'episodes', null, { ...failed, ...group.filter })}>
        <b class="count">${number(group.number)}</b><span class="bar" aria-hidden="true"><i style=${{ width: `${(100 * group.number) / most}%` }}></i></span>
        <span class="cause" dir="auto">${group.text}</span>${group.stop && by === 'observation' && html`<span class="soft">${group.stop}</span>`}</a></li>`)}</ol>
      ${data.num_groups > data.groups.length && html`<p class="soft">${plural(data.num_groups - data.groups.length, 'smaller group')} not shown</p>`}` : html`<${Waiting} error=${error} />`}`}
  </section>`;
}
function Signs({ signs }) {
  if (!signs.length) return null;
  return html`<ul class="note" aria-label="warnings">${signs.map(({ text, step, last }) => html`<li><b class="bad">${last === step ? `step ${step}` : `steps ${step}–${last}`}</b> ${text}</li>`)}</ul>`;
}
function Evaluations({ run, evaluations }) {
  if (!evaluations.length) return null;
  return html`<section><h2>Evaluations</h2><${Table}><thead><tr><th scope="col">phase</th><th scope="col" class="n">step</th><th scope="col" class="n">success</th><th scope="col">95% interval</th><th scope="col" class="n">reward</th><th scope="col">95% interval</th><th scope="col" class="n">episodes</th><th scope="col" class="n">no reward</th></tr></thead>
    <tbody>${evaluations.map((each) => html`<tr onClick=${() => go(run, 'episodes', null, { phase: each.phase, first_step: each.step, last_step: each.step })}><td><a href=${address(run, 'episodes', null, { phase: each.phase, first_step: each.step, last_step: each.step })}>${phaseName(each.phase)}</a></td><td class="n">${each.step}</td><td class="n">${percent(each.success)}</td><td>${interval(each.success_interval, percent)}</td><td class="n">${number(each.reward_mean, 3)}</td><td>${interval(each.reward_mean_interval)}</td><td class="n">${number(each.num_episodes)}</td><td class="n">${number(each.num_failed)}</td></tr>`)}</tbody><//></section>`;
}
function Repeats({ scores }) {
  const repeated = scores.filter((each) => each.k.some((at) => at.k > 1));
  if (!repeated.length) return null;
  const rate = (at, name) => html`<td>${number(at[name], 3)} ${interval(at[`${name}_interval`])}</td>`;
  return html`<section><h2>Of k episodes of a task <small>one succeeds · all succeed · the best reward (95%, by task)</small></h2><${Table}>
    <thead><tr><th scope="col">tasks</th><th scope="col" class="n">k</th><th scope="col">pass@k</th><th scope="col">pass^k</th><th scope="col">best@k</th></tr></thead><tbody>${repeated.flatMap((each) => each.k.map((at, i) => html`<tr><td>${i ? '' : `${each.env ?? 'all'}${each.difficulty === null ? '' : `, difficulty ${each.difficulty}`}: ${each.num_tasks}`}</td><td class="n">${at.k}</td>${['pass_at_k', 'pass_hat_k', 'best_at_k'].map((key) => rate(at, key))}</tr>`))}</tbody><//></section>`;
}
function OverviewPage({ run, state, overview, version, theme }) {
  const { curves, evaluations, last, signs } = overview;
  return html`<h1 class="hidden">${state.name}</h1><${Headline} evaluations=${evaluations} curves=${curves} state=${state} />
    <${Signs} signs=${signs} />
    ${last ? html`<${Failures} run=${run} last=${last} version=${version} />` : html`<p class="note">No episodes are recorded yet.</p>`}
    <${Curves} curves=${curves} evaluations=${evaluations.filter((each) => each.phase.startsWith('eval'))} theme=${theme} onStep=${(step) => go(run, 'episodes', null, { phase: 'train', first_step: step, last_step: step })} />
    <${Evaluations} run=${run} evaluations=${evaluations} /><${Repeats} scores=${overview.at_k} />`;
}
