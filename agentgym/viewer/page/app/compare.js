// ---- runs beside each other ---------------------------------------------------------------------------------------
function TaskList({ title, tasks, first, run }) {
  if (!tasks.length) return null;
  return html`<details><summary>${title}: ${number(tasks.length)}</summary><${Table}><thead><tr><th scope="col">task</th><th scope="col" class="n">first</th><th scope="col" class="n">here</th></tr></thead><tbody>
    ${tasks.map(([task, before, after, firstLine, line]) => html`<tr><td dir="auto">${task}</td><td class="n"><a href=${address(first, 'episode', firstLine)}>${percent(before)}</a></td><td class="n"><a href=${address(run, 'episode', line)}>${percent(after)}</a></td></tr>`)}</tbody><//></details>`;
}
const over = (value, ends) => (value === undefined || value === null ? '–' : `${signed(value, 3)} ${ends ? interval(ends) : 'in every task'}`);
function ComparePage({ version, theme }) {
  const { data, error } = useApi('compare', {}, version);
  if (!data) return html`<${Waiting} error=${error} />`;
  const runs = data.runs.map((run, i) => ({ ...run, colour: COLOURS[i % COLOURS.length] }));
  const curve = (key) => runs.map((run) => evaluationPoints(run.evaluations.filter((each) => each.phase.startsWith('eval')), key, run.name, run.colour));
  return html`<h1>Runs beside each other <small>differences are over the first run, on the tasks that both played, with 95% intervals</small></h1>
    <${Table}><thead><tr><th scope="col">run</th><th scope="col" class="n">success</th><th scope="col">95% interval</th><th scope="col">success over the first</th><th scope="col" class="n">reward</th><th scope="col">reward over the first</th><th scope="col" class="n">shared tasks</th></tr></thead><tbody>
    ${runs.map((run, i) => html`<tr onClick=${(event) => event.target.closest('a') || go(i, 'overview')}><td><i class="dot" style=${{ background: `var(${run.colour})` }}></i> <a href=${address(i, 'overview')} title=${run.path}>${run.name}</a></td><td class="n">${percent(run.last?.success)}</td><td>${interval(run.last?.success_interval, percent)}</td><td>${i ? over(run.over_first?.success, run.over_first?.success_interval) : ''}</td><td class="n">${number(run.last?.reward_mean, 3)}</td><td>${i ? over(run.over_first?.reward, run.over_first?.reward_interval) : ''}</td><td class="n">${i ? number(run.over_first?.num_tasks ?? 0) : ''}</td></tr>`)}</tbody><//>
    ${runs.slice(1).some((run) => !run.over_first) && html`<p class="soft">– : no task in common with the first, or no evaluation</p>`}
    ${data.changed_environments.length > 0 && html`<p class="note">Not the same in all runs, by its code or its data: ${data.changed_environments.join(', ')}</p>`}
    <section><h2>Held-out tasks</h2><div class="plots wide"><${Plot} title="Success" lines=${[]} points=${curve('success')} height=${260} theme=${theme} /><${Plot} title="Reward" lines=${[]} points=${curve('reward_mean')} height=${260} theme=${theme} /></div></section>
    <section><h2>Tasks won and lost</h2>${runs.slice(1).map((run, i) => html`<h3>${run.name} <small>against ${runs[0].name}</small></h3><${TaskList} title="won" tasks=${run.won} first=${0} run=${i + 1} /><${TaskList} title="lost" tasks=${run.lost} first=${0} run=${i + 1} />${!run.won.length && !run.lost.length && html`<p class="soft">none</p>`}`)}</section>
    <section><h2>Settings that differ</h2>${data.settings.length ? html`<${Table}><thead><tr><th scope="col">setting</th>${runs.map((run) => html`<th scope="col">${run.name}</th>`)}</tr></thead><tbody>${data.settings.map(([name, ...values]) => html`<tr><th scope="row">${name}</th>${values.map((value) => html`<td class="long" dir="auto">${value || '–'}</td>`)}</tr>`)}</tbody><//>` : html`<p class="soft">none</p>`}</section>`;
}
