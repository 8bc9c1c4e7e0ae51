/* The last lines that the run printed, where its output is kept. */
(function (hf) {
    "use strict";
    const { id, say } = hf;
    const root = document.documentElement;
    const PERIOD = 5000;

    async function follow() {
        try {
            const answer = await fetch(root.dataset.output, {
                credentials: "same-origin",
                cache: "no-store",
            });
            if (answer.ok) show(await answer.json());
        } catch {
            // The rest of the page says that there is no connection.
        }
        // Of a run that has ended, nothing more comes.
        if (!hf.view || hf.view.run.is_live) setTimeout(follow, document.hidden ? 30000 : PERIOD);
    }

    function show(found) {
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

    hf.followOutput = function () {
        if (root.dataset.output) follow();
    };
})(holdfast);
