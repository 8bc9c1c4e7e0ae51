/* Curves of several runs on one axis: smoothed, and aligned so that all have a value at each x. */
(function (hf) {
    "use strict";
    const MOST = 1500;

    /** An exponential average without the bias of its start; `weight` is of the past. */
    hf.smoothed = function (values, weight) {
        if (!weight) return values;
        let mean = 0;
        let sum = 0;
        return values.map((value) => {
            if (!hf.isNumber(value)) return null;
            mean = mean * weight + value * (1 - weight);
            sum = sum * weight + (1 - weight);
            return mean / sum;
        });
    };

    /** The points of a curve that can be drawn: [x, y], x rising. */
    function points(curve, over, weight, isLog) {
        if (!curve) return [[], []];
        const values = hf.smoothed(curve.value, weight);
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
    hf.aligned = function (curves, over, weight, isLog) {
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
    };
})(holdfast);
