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
});
source.onerror = () => {
  place('state').textContent = source.readyState === EventSource.CLOSED
    ? 'This page is not served any more, or not to you: start freetrain watch --web again.'
    : 'No connection to freetrain watch --web; trying again.';
  place('state').className = 'bad';
};
