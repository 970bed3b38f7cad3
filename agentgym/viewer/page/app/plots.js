// ---- plots -----------------------------------------------------------------------------------------------------
const COLOURS = ['--c0', '--c1', '--c2', '--c3', '--c4', '--c5', '--c6', '--c7'];
function css(name) { // a canvas knows neither variables nor light-dark()
  const probe = document.getElementById('app');
  probe.style.color = `var(${name})`;
  const colour = getComputedStyle(probe).color;
  probe.style.color = '';
  return colour;
}
function smooth(values) {
  const keep = 1 - 1 / Math.max(1, values.length / 20);
  let total = 0, weight = 0;
  return values.map((value) => (value === null ? null : ((total = keep * total + value), (weight = keep * weight + 1), total / weight)));
}
// lines: [{label, x, y, colour, faint}], points: [{label, x, y, low, high, colour}]
function joined(lines, points) {
  const xs = [...new Set([...lines, ...points].flatMap((each) => each.x))].sort((a, b) => a - b);
  const at = new Map(xs.map((x, i) => [x, i]));
  const spread = (each) => {
    const values = new Array(xs.length).fill(null);
    each.x.forEach((x, i) => { values[at.get(x)] = each.y[i]; });
    return values;
  };
  return [xs, ...lines.map(spread), ...points.map(spread)];
}
function summary(title, each) {
  const known = each.y.map((y, i) => [each.x[i], y]).filter(([, y]) => y !== null);
  if (!known.length) return '';
  const ys = known.map(([, y]) => y);
  return `${title} ${each.label}: ${number(known[0][1])} at step ${known[0][0]}, ${number(known.at(-1)[1])} at step ${known.at(-1)[0]}, from ${number(Math.min(...ys))} to ${number(Math.max(...ys))}.`;
}
function range(lines, points) {
  const values = [...lines.flatMap((each) => each.y), ...points.flatMap((each) => [...each.y, ...each.low, ...each.high])].filter((value) => value !== null && value !== undefined);
  if (!values.length) return [0, 1];
  const low = Math.min(...values), high = Math.max(...values);
  if (points.length && low >= 0 && high <= 1) return [0, 1]; // a rate: a small one must not look like a whole one
  if (low === high) return low === 0 ? [0, 1] : [Math.min(0, low), Math.max(0, high)];
  return [low, high];
}
function errorBars(points) {
  return (plot) => {
    const { ctx } = plot;
    points.forEach((each, index) => {
      ctx.save();
      ctx.strokeStyle = ctx.fillStyle = css(each.colour);
      ctx.lineWidth = 1.5 * devicePixelRatio;
      ctx.setLineDash([]);
      each.x.forEach((x, i) => {
        if (each.y[i] === null) return;
        const left = plot.valToPos(x, 'x', true), y = (value) => plot.valToPos(value, 'y', true), size = 4.5 * devicePixelRatio;
        ctx.beginPath();
        if (each.low[i] !== null) { ctx.moveTo(left, y(each.low[i])); ctx.lineTo(left, y(each.high[i])); ctx.stroke(); }
        ctx.beginPath();
        ctx.moveTo(left, y(each.y[i]) - size); ctx.lineTo(left + size, y(each.y[i])); ctx.lineTo(left, y(each.y[i]) + size); ctx.lineTo(left - size, y(each.y[i]));
        ctx.fill();
      });
      ctx.restore();
    });
  };
}
function Plot({ title, lines, points = [], height = 170, theme, onStep }) {
  const box = useRef(null), key = JSON.stringify([lines, points, theme, height]);
  useEffect(() => {
    const data = joined(lines, points), [low, high] = range(lines, points);
    if (data[0].length === 1) { data[0].push(data[0][0] + 1); data.slice(1).forEach((each) => each.push(null)); }
    const axis = { stroke: css('--soft'), grid: { stroke: css('--line'), width: 1 }, ticks: { show: false }, font: '11px system-ui, sans-serif' };
    const plot = new uPlot({
      width: Math.max(120, box.current.clientWidth), height, padding: [10, 10, 0, 0],
      scales: { x: { time: false }, y: { range: [low, high] } },
      axes: [{ ...axis, size: 26, values: (_, all) => all.map((x) => (Number.isInteger(x) ? String(x) : '')) }, { ...axis, size: 48, values: (_, all) => all.map((y) => number(y, 3)) }],
      series: [{ label: 'step' },
        ...lines.map((each) => ({ label: each.label, stroke: css(each.colour), width: each.faint ? 1 : 2, alpha: each.faint ? 0.35 : 1, spanGaps: false, points: { show: each.x.length < 3 }, value: (_, y) => number(y, 3) })),
        ...points.map((each) => ({ label: each.label, stroke: css(each.colour), width: 1, dash: [3, 3], spanGaps: true, points: { show: false }, value: (_, y) => number(y, 3) }))],
      cursor: { drag: { x: true, y: false }, points: { size: 6 } },
      legend: { show: true },
      hooks: { draw: [errorBars(points)] },
    }, data, box.current);
    const observer = new ResizeObserver(() => plot.setSize({ width: Math.max(120, box.current.clientWidth), height }));
    observer.observe(box.current);
    if (onStep) plot.over.addEventListener('click', () => { if (plot.cursor.idx !== null && !plot.select.width) onStep(data[0][plot.cursor.idx]); });
    return () => { observer.disconnect(); plot.destroy(); };
  }, [key]);
  const text = [...points, ...lines.filter((each) => !each.faint)].map((each) => summary(title, each)).join(' ');
  return html`<figure class="plot"><figcaption>${title}</figcaption><div ref=${box} role="img" aria-label=${text || title}></div></figure>`;
}
function evaluationPoints(evaluations, key, label, colour) {
  const scored = evaluations.filter((each) => each[key] !== null);
  const ends = (side) => scored.map((each) => each[`${key}_interval`]?.[side] ?? null);
  return { label, colour, x: scored.map((each) => each.step), y: scored.map((each) => each[key]), low: ends(0), high: ends(1) };
}
function Curves({ curves, evaluations, theme, onStep }) {
  const [isAll, setAll] = useState(false);
  const plots = curves.series.filter((series) => isAll || !series.extra).map((series) => {
    const isLong = series.values.filter((value) => value !== null).length > 40;
    const line = { label: isLong ? 'smoothed' : 'training', x: curves.steps, y: isLong ? smooth(series.values) : series.values, colour: '--c0' };
    const lines = isLong ? [{ ...line, label: 'training', y: series.values, faint: true }, line] : [line];
    const points = ['success', 'reward_mean'].includes(series.key) && evaluations.length ? [evaluationPoints(evaluations, series.key, 'held-out', '--c1')] : [];
    return html`<${Plot} key=${series.key} title=${series.title} lines=${lines} points=${points} theme=${theme} onStep=${onStep} />`;
  });
  if (!plots.length) return null;
  const extras = curves.series.filter((series) => series.extra).length;
  return html`<section aria-label="Learning curves"><h2>Learning curves <small>a click shows the episodes of a step; dragging zooms</small></h2>
    <div class="plots">${plots}</div>${extras > 0 && html`<button onClick=${() => setAll(!isAll)} aria-expanded=${isAll}>${isAll ? 'fewer curves' : `${extras} more curves`}</button>`}</section>`;
}
