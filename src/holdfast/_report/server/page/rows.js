/* A run as a row of the table. Whatever a run says of itself goes through textContent only. */
const holdfastRows = (function () {
  "use strict";
  const number = (value) => value.toLocaleString("en-US");
  let ahead = 0; // of our clock, in seconds: the server may stand behind a tunnel

  function now() {
    return Date.now() / 1000 - ahead;
  }

  function span(seconds) {
    const all = Math.max(0, Math.round(seconds));
    if (all < 60) return `${all} s`;
    if (all < 3600) return `${Math.floor(all / 60)} min`;
    if (all < 86400) return `${Math.floor(all / 3600)} h ${Math.floor((all % 3600) / 60)} min`;
    return `${Math.floor(all / 86400)} d`;
  }

  function ago(moment) {
    const passed = now() - moment;
    return passed < 5 ? "now" : `${span(passed)} ago`;
  }

  function progress(row) {
    if (row.step === undefined) return "";
    const total = row.total ? ` of ${number(row.total)}` : "";
    const epoch = row.epoch && row.epochs ? `epoch ${row.epoch} of ${row.epochs}, ` : "";
    return `${epoch}step ${number(row.step)}${total}`;
  }

  /* What a live run still needs, and its newest loss; of an ended one the last loss. */
  function outlook(row) {
    const found = [];
    if (row.live && row.left !== undefined) found.push(`about ${span(row.left)} left`);
    if (row.metric) found.push(`${row.metric[0]} ${figure(row.metric[1])}`);
    return found.join(", ");
  }

  function figure(value) {
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2);
    return String(Number(value.toPrecision(4)));
  }

  function share(row) {
    if (!row.total || row.step === undefined) return null;
    return Math.max(0, Math.min(1, row.step / row.total));
  }

  function safe(row) {
    const memory = row.memory_step;
    const disk = row.disk_step;
    if (memory === undefined && disk === undefined) {
      return row.state === "unreadable" ? [] : [row.live || row.state === "new" ? "nothing yet" : "nothing"];
    }
    const lines = [];
    if (memory !== undefined && (row.live || disk === undefined || memory > disk)) {
      lines.push(`step ${number(memory)} in memory`);
    }
    if (disk === undefined) lines.push("nothing on disk");
    else lines.push(`step ${number(disk)} on disk` + (row.disk_at ? `, ${ago(row.disk_at)}` : ""));
    return lines;
  }

  function job(row) {
    if (!row.job) return [];
    if (!row.job.end) return [`job ${row.job.id}`];
    return [`${span(row.job.end - now())} left`, `job ${row.job.id}`];
  }

  function element(name, className, text) {
    const made = document.createElement(name);
    if (className) made.className = className;
    if (text !== undefined) made.textContent = text;
    return made;
  }

  function lines(cell, texts) {
    const spans = texts.map((text, at) => element("span", at ? "more" : "", text));
    const box = element("div");
    box.append(...spans);
    cell.replaceChildren(...(texts.length ? [box] : []));
  }

  /* Make a row once; `fill` sets what has changed, so that focus and selection stay. */
  function make(onPick) {
    const tr = element("tr");
    tr.setAttribute("role", "row");
    const pick = element("td", "pick");
    pick.setAttribute("role", "cell");
    const box = element("input");
    box.type = "checkbox";
    box.addEventListener("change", () => onPick(made.key, box.checked));
    const held = element("label");
    held.append(box);
    pick.append(held);
    const head = element("th");
    head.scope = "row";
    head.setAttribute("role", "rowheader");
    const link = element("a");
    const under = element("div");
    head.append(link, under);
    const cells = ["State", "Progress", "Safe", "SLURM", "Last sign"].map((label) => {
      const td = element("td", label === "State" ? "" : label === "SLURM" ? "wide slurm" : "wide");
      td.setAttribute("role", "cell");
      td.dataset.label = label;
      return td;
    });
    const chip = element("span", "chip");
    cells[0].append(chip);
    tr.append(pick, head, ...cells);
    const made = { tr, box, link, under, chip, cells, key: "", told: "" };
    return made;
  }

  function fill(made, row) {
    const shown = { progress: progress(row), safe: safe(row), job: job(row), at: row.at ? ago(row.at) : "" };
    const told = JSON.stringify([row, shown]);
    if (told === made.told) return;
    made.told = told;
    made.link.textContent = row.name;
    made.box.setAttribute("aria-label", `Select ${row.name}`);
    made.chip.textContent = row.state;
    made.chip.dataset.state = row.state;
    const worse = row.state === "stuck" || row.state === "unreadable";
    const under = (row.warnings || []).map((text) => element("span", worse ? "warning is-bad" : "warning", text));
    if (row.how && row.how !== row.state && row.how !== "closed") under.unshift(element("span", "more", row.how));
    const where = [row.host && `on ${row.host}`, row.ranks && `${row.ranks} ranks`, row.attempt > 1 && `attempt ${row.attempt}`];
    const place = where.filter(Boolean).join(", ");
    if (place) under.unshift(element("span", "more", place));
    if (row.tags) {
      const tags = element("span", "tags");
      tags.append(...row.tags.map((tag) => element("span", "tag", tag)));
      under.push(tags);
    }
    if (row.note) under.push(element("span", "more", row.note));
    made.under.replaceChildren(...under);
    fillProgress(made.cells[1], row, shown.progress);
    lines(made.cells[2], shown.safe);
    lines(made.cells[3], shown.job);
    lines(made.cells[4], shown.at ? [row.live ? "live" : shown.at] : []);
  }

  function fillProgress(cell, row, text) {
    const part = share(row);
    const box = element("div");
    if (text) box.append(element("span", "", part === null ? text : `${text} (${Math.floor(100 * part)}%)`));
    if (part !== null) {
      const bar = element("div", "bar");
      bar.setAttribute("aria-hidden", "true"); // the words below say the same
      const inner = element("div", "bar-fill");
      inner.style.width = `${100 * part}%`;
      bar.append(inner);
      box.append(bar);
    }
    const next = outlook(row);
    if (next) box.append(element("span", "more", next));
    if (row.phase) box.append(element("span", "more", `in ${row.phase}`));
    cell.replaceChildren(...(box.childNodes.length ? [box] : []));
  }

  return {
    make,
    fill,
    element,
    number,
    setClock: (server) => { ahead = Date.now() / 1000 - server; },
    now,
  };
})();
