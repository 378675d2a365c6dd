// The size of a canvas in pixels of the screen, which follows that of its element.
import { useLayoutEffect, useState } from "preact/hooks";
import type { RefObject } from "preact";

export function useCanvasSize(canvas: RefObject<HTMLCanvasElement>): { readonly width: number; readonly height: number } {
  const [size, setSize] = useState({ width: 0, height: 0 });
  useLayoutEffect(() => {
    const element = canvas.current;
    if (element === null) return;
    const measure = (): void => {
      const factor = window.devicePixelRatio || 1;
      const [width, height] = [Math.round(element.clientWidth * factor), Math.round(element.clientHeight * factor)];
      setSize((before) => (before.width === width && before.height === height ? before : { width, height }));
    };
    measure();
    const observer = new ResizeObserver(measure);
    observer.observe(element);
    return () => observer.disconnect();
  }, []);
  return size;
}
