// Browsers refuse workers to pages that are opened from a folder. There the search's worker runs in a
// hidden frame instead.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.onmessage = null;
      window.addEventListener("message", (event) => {
        if (event.source !== this.frame.contentWindow) return;
        const message = new MessageEvent("message", { data: event.data });
        this.dispatchEvent(message);
        if (this.onmessage) this.onmessage(message);
      });
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.appendChild(this.frame);
      const page = this.frame.contentDocument;
      this.ready = new Promise((resolve) => (this.frame.contentWindow.workerIsReady = resolve));
      page.open();
      page.write(
        "<script>" +
          "var target = parent;" +
          "var postMessage = (data) => target.postMessage(data, '*');" +
          "var importScripts = () => Promise.resolve();" +
          `</script><script src="${url}"></script><script>workerIsReady()</script>`
      );
      page.close();
    }

    postMessage(data) {
      const deliver = () =>
        this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }));
      this.ready.then(deliver);
    }

    terminate() {
      this.frame.remove();
    }
  };
}
