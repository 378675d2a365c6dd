// Where a step goes on the critical path: parts that add up to the step.
import type { BreakdownAnswer } from "./answers";
import { quantity } from "./format";

export function StepParts({ of }: { of: BreakdownAnswer }) {
  return (
    <section class="card">
      <h2>Where a step goes</h2>
      <p class="faint">On the critical path, mean of the last {of.steps} steps that were looked at. The parts add up to the step.</p>
      <div class="scroll">
        <table>
          <thead>
            <tr>
              <th>Part</th>
              <th class="number" title="Seconds of a step on the critical path">Time</th>
              <th class="number" title="Share of the step">Share</th>
              <th title="The groups of this kind: what a rank transfers in them per step, and the bus bandwidth while they transfer">Groups</th>
            </tr>
          </thead>
          <tbody>
            {of.parts.map((part) => (
              <tr key={part.text}>
                <td>{part.text}</td>
                <td class="number">{quantity(part.seconds, "seconds")}</td>
                <td class="number">{quantity(part.ratio, "ratio")}</td>
                <td class="faint">{part.details}</td>
              </tr>
            ))}
          </tbody>
          <tfoot>
            <tr>
              <td>step</td>
              <td class="number">{quantity(of.step_seconds, "seconds")}</td>
              <td class="number">{quantity(1, "ratio")}</td>
              <td />
            </tr>
          </tfoot>
        </table>
      </div>
    </section>
  );
}
