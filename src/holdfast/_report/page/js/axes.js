/* What all charts share: axes in our ink, and a cursor that keys move. */
(function (hf) {
    "use strict";

    /** The line that stands for a curve in a key; `look`: "", ".is-dashed", … */
    hf.line = function (colour, look) {
        const line = hf.el(`span.line${look}`, { aria: { hidden: "true" } });
        line.style.borderColor = `var(--${colour})`;
        return line;
    };

    hf.axis = (values, extra) => ({
        stroke: () => hf.colour("ink-2"),
        font: `11px ${hf.sans()}`,
        grid: { stroke: () => hf.colour("line"), width: 1 },
        ticks: { show: false },
        gap: 6,
        values,
        ...extra,
    });

    /** Round numbers from 1 on, as distances between labels. */
    hf.roundSizes = (powers) =>
        [1, 2, 5]
            .flatMap((digit) => Array.from({ length: powers }, (_, power) => digit * 10 ** power))
            .sort((a, b) => a - b);
    hf.STEP_SIZES = hf.roundSizes(13);

    /** The axis of values: labels take the room they need, no less than three digits. */
    hf.valueAxis = (format, incrs) =>
        hf.axis((_, splits) => splits.map((value) => (value === null ? "" : format(value))), {
            size: (_, values) =>
                16 + 6.6 * (values || []).reduce((most, text) => Math.max(most, text.length), 3),
            incrs,
            space: 28,
        });

    hf.stepRange = (_, low, high) =>
        low === null ? [0, 1] : low === high ? [low - 1, high + 1] : [low, high];

    /** Left and right keys read values. `plotOf` gives the plot, once there is one. */
    hf.readByKeys = function (stage, reading, plotOf) {
        stage.addEventListener("keydown", (event) => {
            const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
            const plot = plotOf();
            if (!by || !plot || event.ctrlKey || event.metaKey || event.altKey) return;
            const xs = plot.data[0];
            if (!xs.length) return;
            event.preventDefault();
            const now = plot.cursor.idx;
            const stride = event.shiftKey ? Math.max(1, Math.round(xs.length / 20)) : 1;
            const start = by > 0 ? 0 : xs.length - 1;
            const next = hf.isNumber(now)
                ? Math.min(xs.length - 1, Math.max(0, now + by * stride))
                : start;
            plot.setCursor({ left: plot.valToPos(xs[next], "x"), top: plot.over.clientHeight / 2 });
        });
        // A reading is announced only while the chart has the focus: else each poll would be spoken.
        stage.addEventListener("focus", () => reading.setAttribute("aria-live", "polite"));
        stage.addEventListener("blur", () => reading.removeAttribute("aria-live"));
    };
})(holdfast);
