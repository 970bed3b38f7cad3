// ---- what a run was made with -------------------------------------------------------------------------------------
function SettingsPage({ run, state }) {
  const { data, error } = useApi('settings', { run }), [filter, setFilter] = useState(''), search = useRef(null);
  useKeys({ '/': () => search.current.focus() });
  if (!data) return html`<${Waiting} error=${error} />`;
  const shown = data.settings.filter(([name, value]) => `${name} ${value}`.toLowerCase().includes(filter.toLowerCase()));
  return html`<h1>Settings <small dir="auto">${state.path}</small></h1>
    ${data.reason && html`<p class="note">${data.reason}</p>`}
    ${data.command && html`<p>The same settings again: <code class="command">${data.command}</code></p>`}
    ${data.made_with.map((line) => html`<p class="soft">${line}</p>`)}
    ${Object.entries(data.environments).length > 0 && html`<h2>Environments</h2><${Table}><thead><tr><th scope="col">environment</th><th scope="col">version</th><th scope="col">package</th><th scope="col">digest of code and data</th></tr></thead><tbody>${Object.entries(data.environments).map(([name, card]) => html`<tr><th scope="row">${name}</th><td>${card.version}</td><td>${card.package} ${card.package_version}</td><td><code>${card.digest}</code></td></tr>`)}</tbody><//>`}
    <h2>All settings <small>secrets are hidden</small></h2><label class="search">find <kbd>/</kbd><input type="search" ref=${search} value=${filter} onInput=${(event) => setFilter(event.target.value)} /></label>
    <${Table}><thead><tr><th scope="col">setting</th><th scope="col">value</th></tr></thead><tbody>${shown.map(([name, value]) => html`<tr><th scope="row">${name}</th><td class="long" dir="auto">${value === '' ? html`<span class="soft">not set</span>` : value}</td></tr>`)}</tbody><//>`;
}
