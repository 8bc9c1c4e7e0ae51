/* The table of a comparison: a row for each run, sorted by any column. */
(function (hf) {
    "use strict";
    const { el, id } = hf;
    const order = { name: "", isDown: false };
    let columns = [];

    /** Numbers by size before texts by alphabet; what is missing stays at the end. */
    const MISSING = 2;
    function rank(value) {
        if (value === undefined || value === null || value === "") return MISSING;
        return typeof value === "string" ? 1 : 0;
    }
    function compare(a, b) {
        const [one, other] = [rank(a), rank(b)];
        const way = order.isDown ? -1 : 1;
        if (one === MISSING || other === MISSING) return one - other;
        if (one !== other) return way * (one - other);
        if (one === 1) return way * a.localeCompare(b, "en", { numeric: true });
        return way * (Number(a) - Number(b));
    }

    /** Columns: {name, title, group, isNumber, value(run), cell(run)}. */
    function columnsOf(shown) {
        const { view, metric, isHigher } = shown;
        const result = (name, side) => (run) => {
            return Object.hasOwn(run.results, name) ? run.results[name][side] : undefined;
        };
        const found = [
            {
                name: "state",
                title: "State",
                value: (run) => run.state,
                cell: (run) =>
                    el("span.chip", { data: { state: run.state } }, run.state),
            },
            {
                name: "step",
                title: "Step",
                isNumber: true,
                value: (run) => run.step,
                cell: (run) => hf.whole(run.step) + (run.total ? ` of ${hf.whole(run.total)}` : ""),
            },
            {
                name: "time",
                title: "Time",
                isNumber: true,
                value: (run) => run.seconds,
                cell: (run) => hf.duration(run.seconds),
            },
        ];
        if (view.runs.some((run) => run.tags.length)) {
            found.push({
                name: "tags",
                title: "Tags",
                value: (run) => run.tags.join(" "),
                cell: (run) =>
                    el("span", run.tags.map((tag) => el("span.tag", tag))),
            });
        }
        const results = (name, title, value) =>
            found.push({ name, title, group: "Results", isNumber: true, value });
        if (metric) results("best", `${metric}, best`, result(metric, isHigher ? "high" : "low"));
        for (const name of view.metrics) results(`last ${name}`, name, result(name, "last"));
        const keys = [...new Set(view.runs.flatMap((run) => Object.keys(run.config)))];
        const differing = new Set(view.differing);
        for (const key of keys) {
            if (shown.onlyDiffering && !differing.has(key)) continue;
            const has = (run) => Object.hasOwn(run.config, key);
            found.push({
                name: `config ${key}`,
                title: key,
                group: "Hyperparameters",
                isNumber: view.runs.every(
                    (run) => !has(run) || typeof run.config[key] === "number",
                ),
                value: (run) => (has(run) ? run.config[key] : undefined),
            });
        }
        if (view.runs.some((run) => run.note)) {
            found.push({ name: "note", title: "Note", value: (run) => run.note });
        }
        return found;
    }

    function sorted(shown) {
        const column = columns.find((each) => each.name === order.name);
        const runs = [...shown.view.runs];
        if (order.name === "run") return runs.sort((a, b) => compare(a.name, b.name));
        return column ? runs.sort((a, b) => compare(column.value(a), column.value(b))) : runs;
    }

    function head(column, redraw) {
        const isSorted = order.name === column.name;
        const button = el(
            "button.sort",
            {
                type: "button",
                on: {
                    click: () => {
                        order.isDown = isSorted ? !order.isDown : false;
                        order.name = column.name;
                        redraw();
                        const way = order.isDown ? "descending" : "ascending";
                        hf.say(id("said"), `Sorted by ${column.title}, ${way}.`);
                    },
                },
                data: { of: column.name },
            },
            column.title,
        );
        const cell = el("th", { scope: "col", className: column.isNumber ? "num" : "" }, button);
        if (isSorted) cell.setAttribute("aria-sort", order.isDown ? "descending" : "ascending");
        return cell;
    }

    function groups() {
        const cells = [el("td")];
        for (const column of columns) {
            const last = cells[cells.length - 1];
            const name = column.group || "";
            if (cells.length > 1 && last.dataset.group === name) last.colSpan += 1;
            else {
                const scope = name ? { scope: "colgroup" } : {};
                cells.push(el(name ? "th" : "td", { data: { group: name }, ...scope }, name));
            }
        }
        return el("tr.group", cells);
    }

    function row(run, shown, redraw) {
        const box = el("input", {
            type: "checkbox",
            checked: !shown.hidden.has(run.key),
            aria: { label: `Show ${run.name} in the chart` },
            data: { of: run.key },
            on: {
                change: () => {
                    if (!shown.hidden.delete(run.key)) shown.hidden.add(run.key);
                    redraw();
                },
            },
        });
        const isBest = run.key === shown.best;
        const name = run.href ? el("a", { href: run.href }, run.name) : el("span", run.name);
        name.title = run.name;
        return el(
            "tr",
            { className: isBest ? "is-best" : "", data: { key: run.key } },
            el(
                "th",
                { scope: "row", className: shown.hidden.has(run.key) ? "is-hidden" : "" },
                el(
                    "span.run",
                    box,
                    hf.line(run.look.colour, run.look.line),
                    isBest ? el("span.chip", { data: { tone: "good" } }, "best") : null,
                    name,
                ),
            ),
            columns.map((column) => {
                const held = column.cell ? column.cell(run) : hf.pythonText(column.value(run));
                const cell = el("td", { className: column.isNumber ? "num" : "" }, held);
                if (typeof held === "string") cell.title = held;
                return cell;
            }),
        );
    }

    /** What had the focus has it after the table was made again. */
    function keepingFocus(make) {
        const body = id("table-body");
        const of = body.contains(document.activeElement) && document.activeElement.dataset.of;
        make(body);
        const all = [...body.querySelectorAll("[data-of]")];
        const again = of && all.find((each) => each.dataset.of === of);
        if (again) again.focus();
    }

    /** Draw it; `shown` is what the page shows, `redraw` draws the whole page again. */
    hf.drawTable = function (shown, redraw) {
        columns = columnsOf(shown);
        const runs = sorted(shown);
        const names = [{ name: "run", title: "Run" }, ...columns];
        const table = el(
            "table.data.compare",
            el("caption.sr-only", "Hyperparameters and results"),
            el("thead", groups(), el("tr", names.map((column) => head(column, redraw)))),
            el("tbody", runs.map((run) => row(run, shown, redraw))),
        );
        keepingFocus((body) => body.replaceChildren(table));
        const count = new Set(shown.view.runs.flatMap((run) => Object.keys(run.config))).size;
        const differ = hf.plural(shown.view.differing.length, "differs", "differ");
        hf.say(
            id("table-words"),
            count
                ? `${hf.plural(count, "hyperparameter")}, of which ${differ}.`
                : "No hyperparameters were recorded: holdfast.Run(…, config={…}) records them.",
        );
    };

    hf.saveTable = function (shown) {
        const rows = sorted(shown).map((run) => [
            run.name,
            ...columns.map((column) => column.value(run)),
        ]);
        hf.saveCsv("runs", ["run", ...columns.map((column) => column.title)], rows);
    };
})(holdfast);
