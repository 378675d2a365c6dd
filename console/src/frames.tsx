// Where a rank's time goes by its stacks: the frames in excess of its peers, and flame graphs.
import { useEffect } from "preact/hooks";
import { addressOf, excess, isServed } from "./api";
import { quantity } from "./format";
import { go, parameter } from "./location";
import { hasToken, openAsCaller } from "./login";
import { Answer, Sentence, useAnswer } from "./parts";

const FRAMES_SECONDS = 20;
const FRAME = "flame";
const FRAMES_SHOWN = 5;
const GRAPHS: readonly (readonly [against: string, title: string])[] = [["none", "Flame graph"], ["cohort", "Against its peers"]];

/** In a sandbox: names in it come from training processes. */
function FlameGraph({ page, title }: { page: string; title: string }) {
  useEffect(() => {
    if (hasToken()) openAsCaller(page, FRAME);
  }, []);
  return <iframe class="flame" name={FRAME} src={hasToken() ? undefined : page} sandbox="allow-scripts" title={title} />;
}

export function Frames({ run, rank }: { run: string; rank: number }) {
  const found = useAnswer((signal) => excess(run, rank, signal), FRAMES_SECONDS, [run, rank]);
  const against = parameter("flame");
  const page = addressOf("flame", { run, ranks: rank, ...(against === "cohort" ? { against } : {}) });
  if (!isServed("excess")) return null;
  return (
    <section class="card">
      <h2>Where its time goes, by its stacks of the last 10 minutes</h2>
      <Answer of={found}>
        {(known) =>
          known.samples === 0 ? (
            <p class="faint">No stack of this rank was sampled. The first samples come after about ten seconds; <code>rankscope doctor</code> says why there are none.</p>
          ) : (
            <>
              {known.sentence !== "" && <p><Sentence text={known.sentence} /></p>}
              {known.reason !== "" && <p class="faint">No comparison yet: {known.reason}.</p>}
              {known.reason === "" && known.frames.length === 0 && <p class="faint">No frame takes significantly more of its time than of its peers' ({known.samples} samples against {known.reference_samples}).</p>}
              {known.frames.length > 0 && (
                <div class="scroll">
                  <table>
                    <thead>
                      <tr>
                        <th class="number" title="Share of the rank's time, anywhere on the stack">Here</th>
                        <th class="number" title="The same share of its peers' time">Peers</th>
                        <th>Phase</th>
                        <th>Frame in excess</th>
                      </tr>
                    </thead>
                    <tbody>
                      {known.frames.slice(0, FRAMES_SHOWN).map((frame) => (
                        <tr key={`${frame.function} ${frame.file} ${frame.line}`}>
                          <td class="number">{quantity(frame.share_ratio, "ratio")}</td>
                          <td class="number">{quantity(frame.reference_share_ratio, "ratio")}</td>
                          <td>{frame.phase}</td>
                          <td class="frame"><code title={frame.file}>{frame.function} ({frame.file.slice(frame.file.lastIndexOf("/") + 1)}:{frame.line})</code></td>
                        </tr>
                      ))}
                    </tbody>
                  </table>
                </div>
              )}
              {known.problems.map((problem) => <p key={problem} class="faint">{problem}</p>)}
              <div class="row">
                {GRAPHS.map(([name, title]) => (
                  <button key={name} aria-pressed={against === name} onClick={() => go({ flame: against === name ? null : name }, { replace: true })}>{title}</button>
                ))}
                {against !== "" && <a href={page} target="_blank" rel="noopener">Open in a tab</a>}
              </div>
              {against !== "" && <FlameGraph key={page} page={page} title={`Flame graph of rank ${rank}`} />}
            </>
          )
        }
      </Answer>
    </section>
  );
}
