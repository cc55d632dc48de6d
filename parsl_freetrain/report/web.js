'use strict';
// Shows what the server sends. Every text goes in as text, never as HTML, except the charts, which
// the server has escaped; no script of theirs would run, since the page's policy forbids it.

const place = id => document.getElementById(id);

function element(tag, kind, text) {
  const made = document.createElement(tag);
  if (kind) made.className = kind;
  if (text !== undefined) made.textContent = text;
  return made;
}

function trainer(t) {
  const card = element('section', 'card');
  card.dataset.trainer = t.name;
  const head = element('h3', '', t.name + ' ');
  head.append(element('span', 'state-' + t.state, t.state));
  card.append(head);
  if (t.why) card.append(element('p', 'quiet', t.why));
  if (t.total) {
    const bar = element('progress');
    bar.max = t.total;
    bar.value = Math.min(t.samples, t.total);
    bar.setAttribute('aria-label', 'samples of ' + t.name);
    card.append(bar);
  }
  const list = element('dl', 'figures');
  for (const [name, value] of Object.entries(t.shown)) {
    const pair = element('div');
    pair.append(element('dt', '', name), element('dd', '', value));
    list.append(pair);
  }
  card.append(list);
  return card;
}

// Metrics: each point is [samples, epochs or null, seconds, value].
const AXES = ['samples', 'epochs', 'seconds'], CURVES_EVERY_MS = 5000;
let curves = {}, trainerNames = [];

function drawing(tag, attributes, text) {
  const made = document.createElementNS('http://www.w3.org/2000/svg', tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function short(value) {
  const size = Math.abs(value);
  for (const [unit, name] of [[1e9, 'G'], [1e6, 'M'], [1e3, 'k']]) {
    if (size >= 10 * unit) return (value / unit).toPrecision(3) / 1 + name;
  }
  return String(value.toPrecision(3) / 1);
}

// The exponential moving average, in which the first values do not count more than others.
function smoothed(points, weight) {
  let mean = 0, share = 0;
  return points.map(([x, y]) => {
    mean = weight * mean + (1 - weight) * y;
    share = weight * share + (1 - weight);
    return [x, mean / share];
  });
}

const kind = name => {
  const place = trainerNames.indexOf(name);
  return place >= 0 && place < 8 ? 't' + place : 'others';
};

function chart(metric, of, axis, weight) {
  const lines = Object.entries(of).map(([name, points]) =>
    [name, points.filter(p => p[axis] !== null).map(p => [p[axis], p[3]])]).filter(line => line[1].length);
  if (!lines.length) return null;
  const all = lines.flatMap(line => line[1]);
  let right = Math.max(...all.map(p => p[0])), low = Math.min(...all.map(p => p[1])), high = Math.max(...all.map(p => p[1]));
  if (low > 0 && low < high / 2) low = 0;
  if (low === high) { low -= Math.abs(low) / 2 || 0.5; high += Math.abs(high) / 2 || 0.5; }
  right = right || 1;
  const at = ([x, y]) => (1000 * x / right).toFixed(1) + ',' + (1000 * (high - y) / (high - low)).toFixed(1);
  const plot = drawing('svg', {class: 'plot low', role: 'img', 'aria-label': metric + ' over ' + AXES[axis]});
  for (const [part, value] of [[0, high], [50, (low + high) / 2], [100, low]]) {
    plot.append(drawing('line', {class: 'grid', x1: 0, x2: '100%', y1: part + '%', y2: part + '%'}));
    plot.append(drawing('text', {class: 'tick y', x: -8, y: part + '%', dy: 4}, short(value)));
  }
  for (const [part, where] of [[0, ' start'], [50, ''], [100, ' end']]) {
    plot.append(drawing('text', {class: 'tick x' + where, x: part + '%', y: '100%', dy: 16}, short(right * part / 100)));
  }
  const inner = drawing('svg', {width: '100%', height: '100%', viewBox: '0 0 1000 1000', preserveAspectRatio: 'none'});
  for (const [name, points] of lines) {
    const add = (line, more) => {
      const drawn = drawing('polyline', {class: 'line ' + kind(name) + more, points: line.map(at).join(' ')});
      drawn.append(drawing('title', {}, name));
      inner.append(drawn);
    };
    if (weight) add(points, ' raw');
    add(weight ? smoothed(points, weight) : points, '');
    if (points.length === 1) {
      const [x, y] = at(points[0]).split(',');
      plot.append(drawing('circle', {class: 'dot ' + kind(name), cx: x / 10 + '%', cy: y / 10 + '%', r: 3.5}));
    }
  }
  plot.append(inner);
  const card = element('section', 'card');
  card.dataset.metric = metric;
  card.append(element('h4', '', metric), plot);
  return card;
}

function showCurves() {
  const axis = AXES.indexOf(place('axis').value), weight = Number(place('smooth').value);
  const cards = Object.entries(curves).map(([metric, of]) => chart(metric, of, axis, weight)).filter(card => card);
  place('metrics').replaceChildren(...cards);
  if (!cards.length) {
    const any = Object.keys(curves).length;
    place('metrics').append(element('p', 'quiet', any ? 'No trainer has a total in epochs, so there is no such axis.' : 'Nothing has been reported yet.'));
  }
  const named = [...new Set(Object.values(curves).flatMap(of => Object.keys(of)))];
  place('legend').replaceChildren(...named.map(name => {
    const item = element('li'), box = drawing('svg', {viewBox: '0 0 10 10', 'aria-hidden': 'true'});
    box.append(drawing('rect', {class: 'area ' + kind(name), width: 10, height: 10}));
    item.append(box, name);
    return item;
  }));
}

async function lookAtCurves() {
  try {
    const answer = await fetch('curves');
    if (answer.ok) {
      curves = await answer.json();
      showCurves();
    }
  } catch {
    // The stream of events says that the connection is lost.
  }
}

place('axis').onchange = place('smooth').oninput = showCurves;
const looking = setInterval(lookAtCurves, CURVES_EVERY_MS);

function blocks(rows) {
  if (!rows.length) return element('p', 'quiet', 'No block is open.');
  const table = element('table'), head = element('tr'), body = element('tbody'), top = element('thead');
  const names = Object.keys(rows[0]);
  names.forEach(name => head.append(element('th', 'text', name)));
  top.append(head);
  for (const row of rows) {
    const line = element('tr');
    names.forEach(name => line.append(element('td', 'text', row[name])));
    body.append(line);
  }
  table.append(top, body);
  return table;
}

function show(seen) {
  document.title = 'FreeTrain: ' + seen.state;
  place('title').textContent = seen.heading;
  place('state').textContent = seen.about;
  place('state').className = 'quiet state-' + seen.state;
  place('note').textContent = seen.note;
  trainerNames = seen.trainers.map(t => t.name);
  if (!document.body.dataset.looks) lookAtCurves();
  place('trainers').replaceChildren(...seen.trainers.map(trainer));
  if (!seen.trainers.length) place('trainers').append(element('p', 'quiet', 'No trainer has been submitted yet.'));
  place('blocks').replaceChildren(blocks(seen.blocks));
  place('foot').textContent = 'Ledger ' + seen.ledger;
  document.body.dataset.looks = Number(document.body.dataset.looks || 0) + 1;
}

const source = new EventSource('events');
source.onmessage = event => show(JSON.parse(event.data));
source.addEventListener('charts', event => { place('charts').innerHTML = JSON.parse(event.data); });
source.addEventListener('problem', event => { place('note').textContent = JSON.parse(event.data); });
source.addEventListener('over', () => {
  source.close();
  document.body.dataset.over = 'yes';
  clearInterval(looking);
  lookAtCurves();
});
source.onerror = () => {
  place('state').textContent = source.readyState === EventSource.CLOSED
    ? 'This page is not served any more, or not to you: start freetrain watch --web again.'
    : 'No connection to freetrain watch --web; trying again.';
  place('state').className = 'bad';
};
