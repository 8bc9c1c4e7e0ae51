/* A live run: polls its view, says when there is no connection, and asks for stop, save, stacks. */
(function (hf) {
    "use strict";
    const { el, id, say } = hf;
    const root = document.documentElement;
    const PERIOD = 2000;
    const READING_PERIOD = 500;
    const OUTPUT_PERIOD = 5000;
    const LONGEST = 30000;
    const ANSWER_LIMIT = 60000;

    let etag = null;
    let failures = 0;
    let period = PERIOD;

    function connection(tone, text, why) {
        const chip = id("connection");
        // A good connection has no word: next to the state of a dead run it would mislead.
        chip.hidden = tone === "good";
        chip.dataset.tone = tone;
        chip.title = why || "";
        say(chip, text);
        root.classList.toggle("is-cut-off", tone === "bad");
    }

    async function fetchWithin(address, options, limit) {
        const stop = new AbortController();
        const clock = setTimeout(() => stop.abort(), limit);
        try {
            return await fetch(address, {
                ...options,
                signal: stop.signal,
                credentials: "same-origin",
                cache: "no-store",
            });
        } finally {
            clearTimeout(clock);
        }
    }

    /** What the server says to a request of ours: {ok, sentence, …}. */
    hf.post = async function (address, body) {
        const headers = {
            "Content-Type": "application/json",
            "X-Holdfast-Token": root.dataset.token || "",
        };
        const options = { method: "POST", headers, body: JSON.stringify(body) };
        try {
            const answer = await fetchWithin(address, options, ANSWER_LIMIT);
            const words = `The server answered ${answer.status}.`;
            const told = await answer.json().catch(() => ({ ok: false, sentence: words }));
            const ok = answer.ok && told.ok !== false;
            return { ...told, ok, sentence: told.sentence || (ok ? "Done." : words) };
        } catch (problem) {
            const isLate = problem.name === "AbortError";
            const late = "No answer within a minute; it may still happen.";
            return { ok: false, sentence: isLate ? late : "The server could not be reached." };
        }
    };

    const GONE = {
        401: "This page's key is no longer valid. Open the address that holdfast ui printed.",
        403: "This page's key is no longer valid. Open the address that holdfast ui printed.",
        404: "This run is gone.",
    };

    async function poll() {
        try {
            const headers = etag ? { "If-None-Match": etag } : {};
            const answer = await fetchWithin(root.dataset.live, { headers }, 15000);
            if (GONE[answer.status]) throw new Error(GONE[answer.status]);
            if (answer.status !== 304) {
                if (!answer.ok) throw new Error(`The server answered ${answer.status}.`);
                const view = await answer.json();
                etag = answer.headers.get("ETag");
                period = hf.reading(view) === null ? PERIOD : READING_PERIOD;
                hf.show(view);
            }
            failures = 0;
            connection("good", "", "");
        } catch (problem) {
            failures += 1;
            const known = Object.values(GONE).includes(problem.message);
            connection("bad", "no connection", problem.message);
            if (known || failures === 2)
                notice(
                    known
                        ? problem.message
                        : "No connection to holdfast ui. This is the last that was heard; trying again.",
                    "bad",
                    true,
                );
        }
        buttons();
        if (!failures && cutOff) {
            cutOff = false;
            id("answer").replaceChildren();
        }
        // A hidden page polls seldom; one that cannot reach the server, more and more seldom.
        const wait = document.hidden ? LONGEST : period * 2 ** Math.min(failures, 5);
        return Math.min(LONGEST, wait);
    }
    let now = () => {};

    let cutOff = false;
    function notice(text, tone, isAboutConnection) {
        cutOff = Boolean(isAboutConnection);
        const old = id("answer").firstChild;
        if (old && old.firstChild.textContent === text) return;
        const clear = () => id("answer").replaceChildren();
        const close = hf.button("×", "Close this message", clear, ".is-quiet");
        id("answer").replaceChildren(
            el("div", { className: `notice is-${tone}` }, el("span", text), close),
        );
    }

    let inFlight = "";
    function buttons() {
        const live = hf.view && hf.view.run.is_live;
        for (const name of ["save", "stacks", "stop"]) {
            const button = id(name);
            button.hidden = !root.dataset[name] || !live;
            button.disabled = Boolean(inFlight) || failures > 1;
            button.setAttribute("aria-busy", String(inFlight === name));
        }
    }

    const ASKING = {
        stop: "Asking it to stop…",
        save: "Asking it to save…",
        stacks: "Asking for the stacks…",
    };
    async function ask(name) {
        if (inFlight) return;
        inFlight = name;
        notice(ASKING[name], "info");
        buttons();
        const told = await hf.post(root.dataset[name], {});
        notice(String(told.sentence), told.ok ? "good" : "bad");
        if (name === "stacks" && told.stacks) showStacks(String(told.stacks));
        inFlight = "";
        buttons();
        // The button had the focus, and lost it when it was disabled.
        if (document.activeElement === document.body && !id(name).hidden) id(name).focus();
        now();
    }

    function showStacks(text) {
        say(id("stacks-text"), text);
        id("stacks-panel").hidden = false;
        id("stacks-title").focus();
    }

    function stopDialog() {
        const dialog = id("ask-stop");
        const run = hf.view.run;
        say(
            id("ask-stop-words"),
            `${run.name} is asked to save its state at the next step and to leave. ` +
                (hf.isNumber(run.step) ? `It is at step ${hf.whole(run.step)}. ` : "") +
                "It can be resumed from there.",
        );
        dialog.showModal();
        id("ask-stop-no").focus();
    }

    // The last lines that the run printed, where its output is kept.
    async function followOutput() {
        try {
            const answer = await fetchWithin(root.dataset.output, {}, 15000);
            if (answer.ok) showOutput(await answer.json());
        } catch {
            // The rest of the page says that there is no connection.
        }
        // Of a run that has ended, nothing more comes.
        if (!hf.view || hf.view.run.is_live) setTimeout(followOutput, document.hidden ? 30000 : OUTPUT_PERIOD);
    }

    function showOutput(found) {
        id("output").hidden = !found.text;
        if (!found.text) return;
        const box = id("output-scroll");
        const isAtEnd = box.scrollTop + box.clientHeight >= box.scrollHeight - 4;
        const isFirst = !id("output-text").textContent;
        say(id("output-words"), `The end of attempt ${found.attempt}, from ${found.where}.`);
        say(id("output-text"), found.text);
        // A reader who has scrolled up stays there.
        if (isAtEnd || isFirst) box.scrollTop = box.scrollHeight;
        hf.places();
    }

    hf.goLive = function () {
        if (root.dataset.index) {
            const brand = el("a.brand", { id: "brand", href: root.dataset.index }, "All runs");
            id("brand").replaceWith(brand);
        }
        id("save").addEventListener("click", () => ask("save"));
        id("stacks").addEventListener("click", () => ask("stacks"));
        id("stop").addEventListener("click", stopDialog);
        id("ask-stop-no").addEventListener("click", () => id("ask-stop").close());
        id("ask-stop-yes").addEventListener("click", () => {
            id("ask-stop").close();
            ask("stop");
        });
        // The browser gives the focus back to the button that opened it; a click outside closes it.
        id("ask-stop").addEventListener("click", (event) => {
            if (event.target === id("ask-stop")) id("ask-stop").close();
        });
        id("stacks-close").addEventListener("click", () => {
            id("stacks-panel").hidden = true;
            if (!id("stacks").hidden) id("stacks").focus();
        });
        now = hf.repeat(poll);
        window.addEventListener("online", now);
        connection("busy", "connecting", "");
        buttons();
        now();
        if (root.dataset.output) followOutput();
    };
})(holdfast);
