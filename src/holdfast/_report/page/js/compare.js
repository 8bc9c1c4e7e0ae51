/* Runs side by side: what the reader wants to see, and where the data comes from. */
(function (hf) {
    "use strict";
    const { el, id, say } = hf;
    const root = document.documentElement;
    const PERIOD = 4000;
    const LONGEST = 30000;

    const shown = {
        view: null,
        metric: null,
        over: "step",
        weight: 0,
        isLog: false,
        isHigher: false,
        onlyDiffering: true,
        hidden: new Set(),
        best: null,
    };
    let etag = null;
    let failures = 0;

    /** The key of the run with the best value so far. */
    function bestOf(runs) {
        const side = shown.isHigher ? "high" : "low";
        let best = null;
        for (const run of runs) {
            if (!Object.hasOwn(run.results, shown.metric)) continue;
            const value = run.results[shown.metric][side];
            if (!hf.isNumber(value)) continue;
            const isBetter = !best || (shown.isHigher ? value > best.value : value < best.value);
            if (isBetter) best = { run, value };
        }
        return best;
    }

    function draw() {
        const { view } = shown;
        const best = shown.metric ? bestOf(view.runs) : null;
        shown.best = best ? best.run.key : null;
        const live = view.runs.filter((run) => run.is_live).length;
        say(
            id("headline"),
            `${hf.plural(view.runs.length, "run")}${live ? `, ${live} live` : ""}. ` +
                (best
                    ? `Best so far by ${shown.metric}: ${best.run.name}, ${hf.number(best.value)}.`
                    : "No metrics were logged."),
        );
        const curves = Object.hasOwn(view.curves, shown.metric) ? view.curves[shown.metric] : [];
        const runs = view.runs
            .map((run, at) => ({ key: run.key, name: run.name, look: run.look, curve: curves[at] }))
            .filter((run) => run.curve && !shown.hidden.has(run.key));
        hf.drawComparison({ ...shown, runs });
        hf.drawTable(shown, draw);
    }

    function offerMetrics() {
        const names = shown.view.metrics;
        if (!hf.changed("metrics", names)) return;
        id("metric").replaceChildren(
            ...names.map((name) => el("option", { value: name }, name)),
        );
        id("chart").hidden = !names.length;
    }

    function choose(metric) {
        shown.metric = metric;
        shown.isHigher = shown.view.higher.includes(metric);
        id("metric").value = metric || "";
        id("goal").value = shown.isHigher ? "high" : "low";
    }

    function take(view) {
        view.runs.forEach((run, at) => {
            run.look = hf.lookOf(at);
            run.href = root.dataset.run ? root.dataset.run + encodeURIComponent(run.key) : "";
        });
        shown.view = view;
        offerMetrics();
        if (!view.metrics.includes(shown.metric)) choose(view.metric);
        draw();
        say(id("foot"), `Made by holdfast ${view.version} on ${hf.moment(view.made_at)}.`);
    }

    // -- a server -----------------------------------------------------------------------

    function address() {
        const wanted = new URLSearchParams(location.search);
        if (shown.metric) wanted.set("metric", shown.metric);
        return `${root.dataset.compared}?${wanted}`;
    }

    async function ask() {
        let isLive = true;
        try {
            const headers = etag ? { "If-None-Match": etag } : {};
            const answer = await fetch(address(), { headers, cache: "no-store" });
            if (answer.status !== 304) {
                if (!answer.ok) throw new Error(`The server answered ${answer.status}.`);
                etag = answer.headers.get("ETag");
                take(await answer.json());
            }
            failures = 0;
            isLive = shown.view.runs.some((run) => run.is_live);
        } catch {
            failures += 1;
        }
        id("trouble").hidden = failures < 2;
        say(
            id("trouble"),
            "holdfast ui does not answer. What you see is how things were when it last did.",
        );
        const wait = document.hidden || !isLive ? LONGEST : PERIOD * 2 ** Math.min(failures, 3);
        return Math.min(LONGEST, wait);
    }
    let poll = () => {};

    // -- what the reader wants ----------------------------------------------------------

    id("metric").addEventListener("change", () => {
        choose(id("metric").value);
        if (Object.hasOwn(shown.view.curves, shown.metric)) draw();
        else {
            etag = null;
            poll();
        }
    });
    id("over").addEventListener("change", () => {
        shown.over = id("over").value;
        draw();
    });
    id("goal").addEventListener("change", () => {
        shown.isHigher = id("goal").value === "high";
        draw();
    });
    id("smooth").addEventListener("input", () => {
        shown.weight = Number(id("smooth").value);
        say(id("smooth-value"), String(shown.weight));
        draw();
    });
    id("log").addEventListener("click", () => {
        shown.isLog = !shown.isLog;
        id("log").setAttribute("aria-pressed", String(shown.isLog));
        draw();
    });
    id("differing").addEventListener("click", () => {
        shown.onlyDiffering = !shown.onlyDiffering;
        id("differing").setAttribute("aria-pressed", String(shown.onlyDiffering));
        draw();
    });
    id("csv").addEventListener("click", () => hf.saveComparison("csv"));
    id("png").addEventListener("click", () => hf.saveComparison("png"));
    id("table-csv").addEventListener("click", () => hf.saveTable(shown));

    const text = id("holdfast-view").textContent.trim();
    const view = text ? JSON.parse(text) : null;
    if (root.dataset.index) {
        const back = el("a.brand", { href: root.dataset.index }, "All runs");
        id("brand").replaceWith(back);
    }
    if (view) {
        take(view);
        performance.mark("holdfast-first-view");
    }
    if (root.dataset.compared) {
        poll = hf.repeat(ask);
        if (view) setTimeout(poll, PERIOD);
        else poll().then(() => performance.mark("holdfast-first-view"));
    }
})(holdfast);
