package penstock.modes.functions;

import org.apache.spark.api.java.function.MapFunction;
import org.apache.spark.api.java.function.MapGroupsWithStateFunction;
import org.apache.spark.sql.Row;
import org.apache.spark.sql.streaming.GroupState;

public class Key implements MapFunction {
    public Object call(Object row) {
        return ((Row) row).get(1);
    }
}

public class Count implements MapGroupsWithStateFunction {
    public Object call(Object key, java.util.Iterator rows, GroupState state) {
        long count = state.exists() ? ((Long) state.get()).longValue() : 0;
        while (rows.hasNext()) {
            rows.next();
            count++;
        }
        state.update(Long.valueOf(count));
        return Long.valueOf(count);
    }
}
