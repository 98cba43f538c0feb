package penstock.modes.sinks;

import java.util.EnumSet;
import java.util.Map;
import java.util.Set;
import org.apache.spark.sql.connector.catalog.SupportsWrite;
import org.apache.spark.sql.connector.catalog.Table;
import org.apache.spark.sql.connector.catalog.TableCapability;
import org.apache.spark.sql.connector.catalog.TableProvider;
import org.apache.spark.sql.connector.expressions.Transform;
import org.apache.spark.sql.connector.write.LogicalWriteInfo;
import org.apache.spark.sql.connector.write.SupportsTruncate;
import org.apache.spark.sql.connector.write.Write;
import org.apache.spark.sql.connector.write.WriteBuilder;
import org.apache.spark.sql.connector.write.streaming.StreamingWrite;
import org.apache.spark.sql.execution.datasources.noop.NoopStreamingWrite$;
import org.apache.spark.sql.internal.connector.SupportsStreamingUpdateAsAppend;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;

public class Adding implements TableProvider, Table, SupportsWrite {
    public StructType inferSchema(CaseInsensitiveStringMap options) {
        return new StructType();
    }

    public Table getTable(StructType schema, Transform[] partitioning, Map properties) {
        return this;
    }

    public String name() {
        return "sink";
    }

    public StructType schema() {
        return new StructType();
    }

    public Set capabilities() {
        return EnumSet.of(TableCapability.STREAMING_WRITE, TableCapability.ACCEPT_ANY_SCHEMA);
    }

    public WriteBuilder newWriteBuilder(LogicalWriteInfo info) {
        return new Writing();
    }
}

public class Emptied extends Adding {
    public WriteBuilder newWriteBuilder(LogicalWriteInfo info) {
        return new Emptying();
    }
}

public class Updated extends Adding {
    public WriteBuilder newWriteBuilder(LogicalWriteInfo info) {
        return new Updating();
    }
}

class Writing implements WriteBuilder, Write {
    public Write build() {
        return this;
    }

    public StreamingWrite toStreaming() {
        return NoopStreamingWrite$.MODULE$;
    }
}

class Emptying extends Writing implements SupportsTruncate {
    public WriteBuilder truncate() {
        return this;
    }
}

class Updating extends Writing implements SupportsStreamingUpdateAsAppend {
}
