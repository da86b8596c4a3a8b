// Conversations, kept by this browser (IndexedDB). Each function rejects where the browser keeps nothing.

const opening = new Promise((resolve, reject) => {
  const request = indexedDB.open("alignedserve", 1);
  request.onupgradeneeded = () => {
    request.result.createObjectStore("talks", { keyPath: "id" }).createIndex("titles", ["changed", "title"]);
  };
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});
opening.catch(() => {});  // whoever asks hears of it

async function run(mode, begin) {
  const transaction = (await opening).transaction("talks", mode);
  const request = begin(transaction.objectStore("talks"));
  return new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve(request.result);
    transaction.onabort = () => reject(transaction.error);
  });
}

/** Ids and titles, the newest first. Contents, which may have pictures, are not read. */
export async function titles() {
  const listed = [];
  await run("readonly", (talks) => {
    const request = talks.index("titles").openKeyCursor(null, "prev");
    request.onsuccess = () => {
      const cursor = request.result;
      if (cursor) {
        listed.push({ id: cursor.primaryKey, title: cursor.key[1] });
        cursor.continue();
      }
    };
    return request;
  });
  return listed;
}

export const load = (id) => run("readonly", (talks) => talks.get(id));
export const loadAll = () => run("readonly", (talks) => talks.index("titles").getAll());
export const save = (talk) => run("readwrite", (talks) => talks.put(talk));
export const remove = (id) => run("readwrite", (talks) => talks.delete(id));
export const removeAll = () => run("readwrite", (talks) => talks.clear());
