/* Which row each stretch of time and each event belongs to: one row an attempt, and the wait
   before an attempt stands in front of it. */
(function (hf) {
    "use strict";

    const ENDS = ["finished", "stop", "death"];

    /** An attempt ends once, however many lines of the journal say so: one mark is shown, the
      others are quiet: they are in the table, and in the tip of the one that is shown. */
    function hush(lane) {
        const ends = lane.events.filter((mark) => ENDS.includes(mark.group));
        const weight = (mark) =>
            ENDS.indexOf(mark.group) * 4 +
            ({ death: 3, finished: 2, exit: 1 }[mark.event.kind] || 0);
        const shown = ends.reduce(
            (best, mark) => (!best || weight(mark) >= weight(best) ? mark : best),
            null,
        );
        for (const mark of ends) mark.isQuiet = mark !== shown;
    }

    hf.makeLanes = function (view) {
        const lanes = view.attempts.map((attempt) => ({
            attempt,
            from: attempt.start,
            to: hf.isNumber(attempt.end) ? attempt.end : view.time.end,
            segments: [],
            events: [],
        }));
        const byNumber = new Map(lanes.map((lane) => [lane.attempt.number, lane]));

        // The first attempt that begins at or after a time; waits lead to it.
        function next(t) {
            let low = 0;
            let high = lanes.length;
            while (low < high) {
                const mid = (low + high) >> 1;
                if (lanes[mid].attempt.start < t - 0.5) low = mid + 1;
                else high = mid;
            }
            return lanes[Math.min(low, lanes.length - 1)];
        }
        // The last attempt that had begun by then; an event without an attempt belongs to it.
        function current(t) {
            let found = lanes[0];
            for (const lane of lanes) {
                if (lane.attempt.start > t + 0.5) break;
                found = lane;
            }
            return found;
        }

        for (const segment of view.segments) {
            const own = segment.attempt === null ? undefined : byNumber.get(segment.attempt);
            const lane = own || next(segment.end);
            if (!lane) continue;
            lane.segments.push(segment);
            lane.from = Math.min(lane.from, segment.start);
            lane.to = Math.max(lane.to, segment.end);
        }
        for (const event of view.events) {
            const lane = byNumber.get(event.attempt) || current(event.t);
            if (!lane) continue;
            lane.events.push({ event, group: hf.groupOf(event, lane.attempt.outcome), lane });
        }
        for (const lane of lanes) {
            const { outcome, end, how, number, last_step: step } = lane.attempt;
            // A machine that went down noted nothing: its end is marked from what is known since.
            const isKnown = lane.events.some((mark) => mark.group === "death");
            if (hf.DEATHS.has(outcome) && hf.isNumber(end) && !isKnown) {
                const event = {
                    t: end,
                    kind: "death",
                    attempt: number,
                    step,
                    level: "bad",
                    title: `Ended: ${outcome}`,
                    text: how,
                };
                lane.events.push({ event, group: "death", lane });
            }
            lane.events.sort((a, b) => a.event.t - b.event.t);
            hush(lane);
        }
        return lanes;
    };

    /** Everything on the page that a key can step through, in time. */
    hf.inOrder = function (lanes, hidden, withQuiet) {
        return lanes
            .flatMap((lane) => lane.events)
            .filter((mark) => !hidden.has(mark.group) && (withQuiet || !mark.isQuiet))
            .sort((a, b) => a.event.t - b.event.t);
    };

    hf.segmentAt = function (lane, t) {
        return lane.segments.find((segment) => segment.start <= t && t < segment.end);
    };

    /** An event in a few lines: [title, text, where and when]. */
    hf.eventLines = function (event) {
        const many = event.count > 1 ? ` × ${hf.whole(event.count)}` : "";
        return [
            event.title + many,
            event.text || "",
            hf.joined([
                hf.moment(event.t),
                hf.isNumber(event.until) ? `for ${hf.duration(event.until - event.t)}` : "",
                hf.isNumber(event.step) ? `step ${hf.whole(event.step)}` : "",
                hf.isNumber(event.attempt) ? `attempt ${event.attempt}` : "",
            ]),
        ];
    };

    hf.segmentLines = function (segment) {
        const name = hf.kindName(segment.kind);
        return [
            `${name[0].toUpperCase()}${name.slice(1)}, ${hf.duration(segment.end - segment.start)}`,
            segment.text && segment.text !== name ? segment.text : "",
            hf.joined([
                `${hf.moment(segment.start)} – ${hf.moment(segment.end)}`,
                hf.isNumber(segment.attempt) ? `attempt ${segment.attempt}` : "",
            ]),
        ];
    };

    hf.attemptLines = function (attempt) {
        const last = hf.isNumber(attempt.end) ? hf.moment(attempt.end) : "now";
        const origin = attempt.origin
            ? `went on at step ${hf.whole(attempt.origin.step)} from ${attempt.origin.source}`
            : "";
        return [
            `Attempt ${attempt.number}: ${attempt.outcome}`,
            hf.capital(attempt.how),
            hf.joined([`${hf.moment(attempt.start)} – ${last}`, origin, attempt.host || ""]),
        ];
    };
})(holdfast);
