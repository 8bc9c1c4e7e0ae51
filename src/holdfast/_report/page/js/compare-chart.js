/* The chart of a comparison: one curve for each run, read at one x for all of them. */
(function (hf) {
    "use strict";
    const { el, id } = hf;
    const COLOURS = 10;
    const DASHES = [null, [7, 4], [2, 3]];
    const LOOKS = ["", ".is-dashed", ".is-dotted"];
    const MOST_READ = 24;
    const MOST = 1500; // places at which curves are read
    const SECONDS = [
        0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600,
        43200, 86400, 172800, 432000, 864000, 2592000,
    ];

    /** The look of a run, by its place in the comparison: colour first, then dashes. */
    hf.lookOf = (place) => ({
        colour: `r-${place % COLOURS}`,
        dash: DASHES[Math.floor(place / COLOURS) % DASHES.length],
        line: LOOKS[Math.floor(place / COLOURS) % LOOKS.length],
    });

    let plot = null;
    let data = [[]];
    let now = null; // what is drawn: {runs, metric, over, weight, isLog, isHigher}

    /** An exponential average without the bias of its start; `weight` is of the past. */
    function smoothed(values, weight) {
        if (!weight) return values;
        let mean = 0;
        let sum = 0;
        return values.map((value) => {
            if (!hf.isNumber(value)) return null;
            mean = mean * weight + value * (1 - weight);
            sum = sum * weight + (1 - weight);
            return mean / sum;
        });
    }

    /** The points of a curve that can be drawn: [x, y], x rising. */
    function points(curve, over, weight, isLog) {
        if (!curve) return [[], []];
        const values = smoothed(curve.value, weight);
        const xs = [];
        const ys = [];
        curve[over].forEach((x, at) => {
            const y = values[at];
            if (!hf.isNumber(x) || !hf.isNumber(y) || (isLog && y <= 0)) return;
            if (xs.length && x <= xs[xs.length - 1]) return;
            xs.push(x);
            ys.push(y);
        });
        return [xs, ys];
    }

    /** Where the curves are read: at all their points, or evenly where those are too many. */
    function places(all) {
        const found = [...new Set(all.flatMap(([xs]) => xs))].sort((a, b) => a - b);
        if (found.length <= MOST) return found;
        const [low, high] = [found[0], found[found.length - 1]];
        return Array.from({ length: MOST }, (_, at) => low + ((high - low) * at) / (MOST - 1));
    }

    /** One column of x and one of y for each curve, straight between its points, null outside. */
    function aligned(curves, over, weight, isLog) {
        const all = curves.map((curve) => points(curve, over, weight, isLog));
        const xs = places(all);
        const columns = all.map(([px, py]) => {
            let at = 0;
            return xs.map((x) => {
                if (!px.length || x < px[0] || x > px[px.length - 1]) return null;
                while (at + 1 < px.length && px[at + 1] <= x) at += 1;
                if (px[at] === x || at + 1 === px.length) return py[at];
                const share = (x - px[at]) / (px[at + 1] - px[at]);
                return py[at] + share * (py[at + 1] - py[at]);
            });
        });
        return [xs, ...columns];
    }

    const atX = (x) => (now.over === "step" ? `step ${hf.whole(x)}` : hf.duration(x));

    function read(index) {
        const box = id("reading");
        const isRead = hf.isNumber(index);
        const rows = now.runs
            .map((run, at) => {
                const column = data[at + 1];
                let value = isRead ? column[index] : null;
                if (!isRead) value = [...column].reverse().find(hf.isNumber);
                return { run, value };
            })
            .filter((row) => hf.isNumber(row.value))
            .sort((a, b) => (now.isHigher ? b.value - a.value : a.value - b.value));
        const where = isRead ? `At ${atX(data[0][index])}` : "Newest values";
        const more = rows.length > MOST_READ ? `, the best ${MOST_READ} of ${rows.length}` : "";
        box.replaceChildren(
            el("p.muted", rows.length ? `${where}${more}` : "No values to show."),
            el(
                "ul",
                rows
                .slice(0, MOST_READ)
                .map(({ run, value }, at) =>
                    el(
                        "li",
                        { className: at ? "" : "is-best" },
                        hf.line(run.look.colour, run.look.line),
                        el("span.name", { title: run.name }, run.name),
                        el("span.num", hf.number(value)),
                    ),
                ),
            ),
        );
    }

    function make() {
        const stage = id("stage");
        const range = plot && plot.isZoomed ? { ...plot.scales.x } : null;
        const pointer = plot && { left: plot.cursor.left, top: plot.cursor.top };
        if (plot) plot.destroy();
        const isTime = now.over === "seconds";
        const longest = () => hf.whole(data[0][data[0].length - 1] || 0).length;
        plot = new uPlot(
            {
                width: Math.max(120, stage.clientWidth),
                height: window.innerWidth < 640 ? 240 : 340,
                legend: { show: false },
                padding: [8, isTime ? 26 : () => 6 + longest() * 3.2, 0, 0],
                cursor: { points: { size: 6 }, drag: { x: true, y: false }, y: false },
                scales: {
                    x: {
                        time: false,
                        range: hf.stepRange,
                    },
                    y: { distr: now.isLog ? 3 : 1 },
                },
                axes: [
                    hf.axis(
                        (_, splits) => splits.map((x) => (isTime ? hf.duration(x) : hf.whole(x))),
                        {
                            size: 26,
                            incrs: isTime ? SECONDS : hf.STEP_SIZES,
                            space: () => 24 + longest() * 7,
                        },
                    ),
                    hf.valueAxis(hf.number),
                ],
                series: [
                    {},
                    ...now.runs.map((run) => ({
                        stroke: () => hf.colour(run.look.colour),
                        width: 1.6,
                        dash: run.look.dash || undefined,
                        points: { show: (_, at) => data[at].filter(hf.isNumber).length === 1 },
                        spanGaps: true,
                    })),
                ],
                hooks: {
                    setCursor: [(chart) => read(chart.cursor.idx)],
                    setScale: [
                        (chart, name) => {
                            if (name !== "x" || !data[0].length) return;
                            const { min, max } = chart.scales.x;
                            chart.isZoomed = min > data[0][0] || max < data[0][data[0].length - 1];
                        },
                    ],
                },
            },
            data,
            stage,
        );
        if (range) plot.setScale("x", { min: range.min, max: range.max });
        if (pointer && pointer.left >= 0) plot.setCursor(pointer);
        else read(null);
    }

    /** Draw the runs: each with `name`, `look` and `curve`. */
    hf.drawComparison = function (wanted) {
        now = wanted;
        const curves = now.runs.map((run) => run.curve);
        data = aligned(curves, now.over, now.weight, now.isLog);
        make();
        hf.say(
            id("summary"),
            `${now.metric || "No metric"} of ${hf.plural(now.runs.length, "run")} over ` +
                `${now.over === "step" ? "steps" : "time"}.`,
        );
    };

    hf.saveComparison = function (kind) {
        const title = now.metric || "comparison";
        const names = [now.over, ...now.runs.map((run) => run.name)];
        if (kind === "csv") {
            hf.saveCsv(
                title,
                names,
                data[0].map((_, row) => data.map((column) => column[row])),
            );
            return;
        }
        const key = now.runs.map((run) => ({
            name: run.name,
            colour: hf.colour(run.look.colour),
            dash: run.look.dash,
        }));
        hf.savePng(title, plot.ctx.canvas, key);
    };

    hf.readByKeys(id("stage"), id("reading"), () => plot);
    new ResizeObserver(() => {
        const width = Math.max(120, id("stage").clientWidth);
        if (plot && width !== plot.width) plot.setSize({ width, height: plot.height });
    }).observe(id("stage"));
    document.addEventListener("holdfast-theme", () => plot && plot.redraw(false, true));
})(holdfast);
