/* uPlot with our ink: one function makes a chart with its title, its reading, and its table. */
(function (hf) {
    "use strict";
    const { el } = hf;
    const charts = new Set();

    const scaleOf = () => window.devicePixelRatio || 1;

    function timeAxis() {
        return hf.axis(
            (chart, splits) =>
                splits.map((place) => {
                    const tick = (chart.ticksOfTime || []).find((each) => each.place === place);
                    if (!tick) return "";
                    if (!tick.clock) return tick.day;
                    return tick.day ? `${tick.clock}\n${tick.day}` : tick.clock;
                }),
            {
                size: 38,
                splits: (chart, index, low, high) => {
                    const count = chart.bbox.width / scaleOf() / 74;
                    chart.ticksOfTime = hf.ticks(hf.span.axis, low, high, count);
                    return chart.ticksOfTime.map((tick) => tick.place);
                },
            },
        );
    }

    const looks = (series) => (series.dash ? ".is-dashed" : series.points ? ".is-dots" : "");

    /** A chart.

      spec: {title, note, x: "step" | "time", log, format, series: [{colour, width, dash, points,
      name}], data(log) -> columns, paint(chart, context), table() -> element, summary() -> text} */
    hf.makeChart = function (spec) {
        const reading = el("p.reading");
        const label = `Chart of ${spec.title}. Left and right keys read values.`;
        const stage = el("div.stage", { tabIndex: 0, role: "group", aria: { label } });
        const summary = el("p.sr-only");
        const button = (text, label, act) => hf.button(text, label, act, ".is-quiet");
        const log = button("log", `log scale for ${spec.title}`, () => {
            chart.isLog = !chart.isLog;
            log.setAttribute("aria-pressed", String(chart.isLog));
            make();
        });
        log.setAttribute("aria-pressed", String(Boolean(spec.log)));
        const reset = button("whole", `whole range of ${spec.title}`, () =>
            chart.plot.setScale("x", { min: data[0][0], max: data[0][data[0].length - 1] }),
        );
        reset.hidden = true;
        const save = (kind) => button(kind, `${kind} of ${spec.title}`, () => chart.save(kind));
        const title = el("h3", { title: spec.title }, spec.title);
        const named = spec.series.filter((series) => series.name);
        const key = named.map((series) =>
            el("li", hf.line(series.colour, looks(series)), series.name),
        );
        const table = hf.folded("As a table", spec.table);
        const box = el(
            "figure.chart",
            el("div.chart-head", title, reading, reset, spec.canLog && log, save("CSV"), save("PNG")),
            key.length > 0 && el("ul.legend.key", key),
            stage,
            summary,
            table,
        );

        const chart = { box, plot: null, isLog: Boolean(spec.log) };
        let data = null;
        let axis = null;

        /** The data again: places on the axis of time change with each fold and each second. */
        function take() {
            axis = hf.span.axis;
            data = spec.data(chart.isLog);
            if (chart.plot) chart.plot.setData(data, true);
        }

        function read(index) {
            hf.say(reading, spec.reading(data, index));
        }

        function make() {
            if (chart.plot) chart.plot.destroy();
            chart.plot = null;
            take();
            const isTime = spec.x === "time";
            const steps = hf.axis((plot, splits) => splits.map((value) => hf.whole(value)), {
                size: 26,
                incrs: hf.STEP_SIZES,
                space: 80,
            });
            // Half of the last label reaches beyond the last step.
            const half = () => 6 + hf.whole(data[0][data[0].length - 1] || 0).length * 3.2;
            const options = {
                width: Math.max(120, stage.clientWidth),
                height: spec.height || 190,
                legend: { show: false },
                padding: [8, isTime ? 22 : half, 0, 0],
                cursor: {
                    points: { size: 7 },
                    drag: { x: true, y: false, setScale: !isTime },
                    sync: isTime ? { key: "time" } : { key: "steps" },
                    y: false,
                },
                scales: {
                    x: {
                        time: false,
                        range: isTime ? () => [hf.span.from, hf.span.to] : hf.stepRange,
                    },
                    y: {
                        distr: chart.isLog ? 3 : 1,
                        range: spec.range && !chart.isLog ? spec.range : undefined,
                    },
                },
                axes: [
                    isTime ? timeAxis() : steps,
                    hf.valueAxis(spec.format, spec.incrs),
                ],
                series: [
                    {},
                    ...spec.series.map((series) => ({
                        stroke: () => hf.colour(series.colour),
                        width: series.width === undefined ? 1.6 : series.width,
                        dash: series.dash,
                        points: series.points
                            ? {
                                  show: true,
                                  size: series.points,
                                  fill: () => hf.colour(series.colour),
                                  width: 0,
                              }
                            : { show: false },
                        paths: series.points ? () => null : undefined,
                        spanGaps: false,
                    })),
                ],
                hooks: {
                    drawAxes: [
                        (plot) =>
                            inside(plot, () => spec.under && spec.under(plot, plot.ctx, chart)),
                    ],
                    draw: [
                        (plot) => inside(plot, () => spec.over && spec.over(plot, plot.ctx, chart)),
                    ],
                    setCursor: [(plot) => read(plot.cursor.idx)],
                    setScale: [
                        (plot, name) => {
                            if (name !== "x" || isTime || !data[0].length) return;
                            const { min, max } = plot.scales.x;
                            reset.hidden = !(min > data[0][0] || max < data[0][data[0].length - 1]);
                        },
                    ],
                    setSelect: [
                        (plot) => {
                            if (!isTime || plot.select.width < 4) return;
                            const from = plot.posToVal(plot.select.left, "x");
                            const to = plot.posToVal(plot.select.left + plot.select.width, "x");
                            plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
                            hf.lookAt(from, to);
                        },
                    ],
                },
            };
            chart.plot = new uPlot(options, data, stage);
            read(null);
        }

        function inside(plot, paint) {
            const { left, top, width, height } = plot.bbox;
            plot.ctx.save();
            plot.ctx.beginPath();
            plot.ctx.rect(left, top, width, height);
            plot.ctx.clip();
            paint();
            plot.ctx.restore();
        }

        chart.update = function () {
            hf.say(summary, spec.summary());
            table.refresh();
            if (!chart.plot) return;
            const { min, max } = chart.plot.scales.x;
            const zoomed = !reset.hidden;
            take();
            // A poll must not change the part that the user has zoomed to.
            if (zoomed && spec.x !== "time") chart.plot.setScale("x", { min, max });
            read(chart.plot.cursor.idx);
        };
        chart.follow = () => {
            if (!chart.plot || spec.x !== "time") return;
            if (axis !== hf.span.axis) take();
            chart.plot.setScale("x", { min: hf.span.from, max: hf.span.to });
        };
        chart.draw = () => {
            if (!chart.plot) make();
        };
        chart.remake = () => {
            if (chart.plot) make();
        };
        chart.repaint = () => chart.plot && chart.plot.redraw(false, true);

        hf.readByKeys(stage, reading, () => chart.plot);

        /** What is drawn, as a file: the numbers, or the picture. */
        chart.save = (kind) => {
            chart.draw();
            const names = spec.series.map((series) => series.name || spec.title);
            const file = `${document.title.replace(/ · holdfast$/, "")} ${spec.title}`;
            if (kind === "CSV") {
                const isTime = spec.x === "time";
                const when = (x) => (isTime ? hf.span.axis.from(x).toFixed(3) : x);
                const rows = data[0].map((x, at) => [
                    when(x),
                    ...data.slice(1).map((column) => column[at]),
                ]);
                hf.saveCsv(file, [isTime ? "time" : "step", ...names], rows);
                return;
            }
            const key = named.map((series) => ({
                name: series.name,
                colour: hf.colour(series.colour),
                dash: series.dash,
            }));
            hf.savePng(file, chart.plot.ctx.canvas, key);
        };
        chart.size = () => {
            if (!chart.plot) return;
            const width = Math.max(120, stage.clientWidth);
            if (width !== chart.plot.width)
                chart.plot.setSize({ width, height: spec.height || 190 });
        };
        chart.discard = () => {
            if (chart.plot) chart.plot.destroy();
            sizes.unobserve(box);
            soon.unobserve(box);
            charts.delete(chart);
            box.remove();
        };
        box.chart = chart;
        charts.add(chart);
        sizes.observe(box);
        soon.observe(box);
        hf.say(summary, spec.summary());
        return chart;
    };

    const sizes = new ResizeObserver((entries) => {
        for (const entry of entries) entry.target.chart.size();
    });
    // Metrics are drawn when they are scrolled into view: there may be 200.
    const soon = new IntersectionObserver(
        (entries) => {
            for (const entry of entries) if (entry.isIntersecting) entry.target.chart.draw();
        },
        { rootMargin: "300px" },
    );

    document.addEventListener("holdfast-theme", () => {
        for (const chart of charts) chart.repaint();
    });
    window.addEventListener("beforeprint", () => {
        for (const chart of charts) chart.draw();
    });
    let asked = false;
    hf.span.watchers.push(() => {
        if (asked) return;
        asked = true;
        requestAnimationFrame(() => {
            asked = false;
            for (const chart of charts) chart.follow();
        });
    });
})(holdfast);
