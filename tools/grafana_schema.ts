// What the dashboards are validated against: Grafana's own types of a dashboard and of the panels that we use.
// Made into a JSON schema by tools/setup_grafana_schema.sh.
import type { Dashboard } from './node_modules/@grafana/schema/dist/types/veneer/dashboard.types';
import type * as BarGauge from './node_modules/@grafana/schema/dist/types/raw/composable/bargauge/panelcfg/x/types.gen';
import type * as Heatmap from './node_modules/@grafana/schema/dist/types/raw/composable/heatmap/panelcfg/x/types.gen';
import type * as Stat from './node_modules/@grafana/schema/dist/types/raw/composable/stat/panelcfg/x/types.gen';
import type * as StatusHistory from './node_modules/@grafana/schema/dist/types/raw/composable/statushistory/panelcfg/x/types.gen';
import type * as Table from './node_modules/@grafana/schema/dist/types/raw/composable/table/panelcfg/x/types.gen';
import type * as Text from './node_modules/@grafana/schema/dist/types/raw/composable/text/panelcfg/x/types.gen';
import type * as TimeSeries from './node_modules/@grafana/schema/dist/types/raw/composable/timeseries/panelcfg/x/types.gen';

interface Panel<Options, Custom> {
  options: Options;
  custom: Custom;
}

export interface Checked {
  dashboard: Dashboard;
  panels: {
    bargauge: Panel<BarGauge.Options, {}>;
    heatmap: Panel<Heatmap.Options, Heatmap.FieldConfig>;
    stat: Panel<Stat.Options, {}>;
    'status-history': Panel<StatusHistory.Options, StatusHistory.FieldConfig>;
    table: Panel<Table.Options, Partial<Table.FieldConfig>>;
    text: Panel<Text.Options, {}>;
    timeseries: Panel<TimeSeries.Options, TimeSeries.FieldConfig>;
  };
}
