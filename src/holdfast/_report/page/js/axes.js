/* What all charts share: axes in our ink, an axis of time, and a cursor that keys move. */
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

    // -- time on an axis -----------------------------------------------------------------------
    // Long waits can be folded, so that two days in a queue do not squeeze the rest. `place` is the
    // axis: seconds since the run's start, less what is folded away.

    const WAITS = { queue: true, down: true, stopped: true, paused: true };

    function longWaits(segments) {
        const waits = [];
        for (const segment of segments) {
            if (!WAITS[segment.kind]) continue;
            const last = waits[waits.length - 1];
            if (last && segment.start - last[1] < 1) last[1] = segment.end;
            else waits.push([segment.start, segment.end]);
        }
        return waits;
    }

    /** What would be folded: waits, and how long one may look. */
    function plan(view) {
        const waits = longWaits(view.segments);
        const whole = view.time.end - view.time.start;
        const busy = whole - waits.reduce((sum, [a, b]) => sum + b - a, 0);
        if (busy <= 0) return { folds: [], spared: 0, cap: 0 };
        const share = Math.min(0.035, Math.max(0.006, 0.5 / Math.max(1, waits.length)));
        const cap = busy * share;
        const folds = waits.filter(([a, b]) => b - a > cap * 1.5);
        const spared = folds.reduce((sum, [a, b]) => sum + (b - a - cap), 0) / (whole || 1);
        return { folds, spared, cap };
    }

    /** Is there enough to fold that the axis should begin folded? */
    hf.worthFolding = (view) => plan(view).spared > 0.25;
    hf.canFold = (view) => plan(view).spared > 0.02;

    /** The axis of a view: to(t), from(place), its length, and the folds on it. */
    hf.makeAxis = function (view, folded) {
        const { folds, cap } = folded ? plan(view) : { folds: [], cap: 0 };
        const start = view.time.start;
        // Pieces: [t0, t1, place0, place1], in order, each straight.
        const pieces = [];
        let t = start;
        let at = 0;
        const add = (until, length, isFold) => {
            if (until <= t && !isFold) return;
            pieces.push({ t0: t, t1: until, p0: at, p1: at + length, isFold });
            t = until;
            at += length;
        };
        for (const [from, to] of folds) {
            add(from, from - t, false);
            add(to, cap, true);
        }
        const end = Math.max(view.time.end, start + 1);
        add(end, end - t, false);
        if (!pieces.length)
            pieces.push({ t0: start, t1: end, p0: 0, p1: end - start, isFold: false });

        function search(value, key) {
            let low = 0;
            let high = pieces.length - 1;
            while (low < high) {
                const mid = (low + high + 1) >> 1;
                if (pieces[mid][key] <= value) low = mid;
                else high = mid - 1;
            }
            return pieces[low];
        }
        return {
            length: pieces[pieces.length - 1].p1,
            pieces,
            folds: pieces.filter((piece) => piece.isFold),
            to(value) {
                const piece = search(value, "t0");
                const share = (value - piece.t0) / (piece.t1 - piece.t0 || 1);
                return piece.p0 + share * (piece.p1 - piece.p0);
            },
            from(place) {
                const piece = search(place, "p0");
                const share = (place - piece.p0) / (piece.p1 - piece.p0 || 1);
                return piece.t0 + share * (piece.t1 - piece.t0);
            },
        };
    };

    const STEPS = [
        1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400,
        172800, 345600, 604800, 1209600, 2592000, 7776000, 15552000, 31536000,
    ];

    /** Round times between two places, so that labels `apart` of them have room. */
    hf.ticks = function (axis, from, to, room) {
        const least = (to - from) / Math.max(1, room);
        const step = STEPS.find((each) => each >= least) || STEPS[STEPS.length - 1];
        const found = [];
        let last = -Infinity;
        for (const piece of axis.pieces) {
            if (piece.isFold || piece.p1 < from || piece.p0 > to) continue;
            const t0 = axis.from(Math.max(from, piece.p0));
            const t1 = axis.from(Math.min(to, piece.p1 - 1e-6));
            // Midnights and full hours of the reader's own clock.
            const shift = -new Date(t0 * 1000).getTimezoneOffset() * 60;
            for (let t = Math.ceil((t0 + shift) / step) * step - shift; t <= t1; t += step) {
                const place = piece.p0 + (t - piece.t0);
                if (place - last < least * 0.95) continue;
                last = place;
                found.push({ t, place });
            }
        }
        // The day is said where it changes; between the changes the clock is enough.
        let day = "";
        for (const tick of found) {
            const today = hf.day(tick.t);
            tick.day = today === day ? "" : today;
            tick.clock = step >= 86400 ? "" : hf.clock(tick.t, step < 60);
            day = today;
        }
        return found;
    };
})(holdfast);
