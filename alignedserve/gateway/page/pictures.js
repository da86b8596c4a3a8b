// Pictures of a question, as data URLs small enough that several fit into a request.

const MOST_BYTES = 300_000;
const LONGEST_EDGE = 1280;  // pixels
const SENT_AS_THEY_ARE = ["image/png", "image/jpeg", "image/webp", "image/gif"];

export async function dataUrlOf(file) {
  const bitmap = await createImageBitmap(file).catch(() => {
    throw new Error("The picture cannot be read.");
  });
  const scale = Math.min(1, LONGEST_EDGE / Math.max(bitmap.width, bitmap.height));
  if (scale === 1 && file.size <= MOST_BYTES && SENT_AS_THEY_ARE.includes(file.type)) {
    return read(file);
  }
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(bitmap.width * scale));
  canvas.height = Math.max(1, Math.round(bitmap.height * scale));
  const paper = canvas.getContext("2d");
  paper.fillStyle = "#fff";  // JPEG has nothing transparent
  paper.fillRect(0, 0, canvas.width, canvas.height);
  paper.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/jpeg", 0.85);
}

function read(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error("The picture cannot be read."));
    reader.readAsDataURL(file);
  });
}
